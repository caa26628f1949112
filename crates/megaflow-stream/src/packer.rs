//! The thread that cuts the row of the documents' tokens into samples.

use std::sync::Arc;

use crate::StreamError;
use crate::documents::DocumentPlace;
use crate::feed::Feed;
use crate::output::{Cursor, Output, StreamCounts};
use crate::state::StreamState;
use crate::window::{Gathered, Gatherer, Window};

/// A run of tokens of one document, part of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPiece {
    /// Where the document lies.
    pub place: DocumentPlace,
    /// First token in it.
    pub offset: usize,
    /// Tokens.
    pub length: usize,
}

/// A sample: `seq_len + 1` tokens, or fewer where the data end.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) tokens: Vec<u32>,
    pub(crate) pieces: Vec<StreamPiece>,
}

/// Why packing stopped.
enum Stop {
    End,
    Stopped,
    Failed(StreamError),
}

struct Packer<'a> {
    feed: &'a Feed,
    gatherer: Gatherer,
    window: Option<Window>,
    /// The next token to be taken: document of the window, token in it.
    document: usize,
    token: usize,
    /// The last token that was taken: the next sample begins with it.
    last: Option<(u32, Cursor, DocumentPlace)>,
    counts: StreamCounts,
}

/// Packs from where `start` says until the data end, something fails, or the stream is closed.
pub(crate) fn pack(feed: &Feed, output: &Output, start: &StreamState) {
    let mut packer = Packer {
        feed,
        gatherer: Gatherer::new(start.window.clone()),
        window: None,
        document: 0,
        token: 0,
        last: None,
        counts: StreamCounts::default(),
    };
    let stop = match packer.go_to(start) {
        Err(stop) => stop,
        Ok(()) => loop {
            match packer.next_sample() {
                Ok((sample, behind)) => {
                    if !output.put(sample, behind, packer.counts) {
                        break Stop::Stopped;
                    }
                }
                Err(stop) => break stop,
            }
        },
    };
    match stop {
        Stop::End => output.end(None),
        Stop::Stopped => {}
        Stop::Failed(error) => output.end(Some(error)),
    }
}

impl Packer<'_> {
    /// Goes to a saved position: its window is gathered anew.
    fn go_to(&mut self, start: &StreamState) -> Result<(), Stop> {
        if start.document == 0 && start.token == 0 {
            return Ok(());
        }
        self.next_window()?;
        let documents = self.window.as_ref().map_or(&[][..], |window| &window.documents);
        let found = documents.get(start.document).filter(|document| start.token < document.tokens().len());
        if found.is_none() {
            let (documents, document, token) = (documents.len(), start.document, start.token);
            let detail =
                format!("its window has {documents} documents, so it has no token {token} of document {document}");
            return Err(Stop::Failed(StreamError::StateMismatch { detail }));
        }
        (self.document, self.token) = (start.document, start.token);
        Ok(())
    }

    fn next_window(&mut self) -> Result<(), Stop> {
        (self.document, self.token) = (0, 0);
        self.window = None; // its memory goes before the next one is gathered
        match self.gatherer.gather(self.feed) {
            Ok(Gathered::Window(window)) => {
                self.counts.epoch = window.start.epoch;
                self.counts.bad_records = self.gatherer.bad_records();
                self.window = Some(window);
                Ok(())
            }
            Ok(Gathered::End) => Err(Stop::End),
            Ok(Gathered::Stopped) => Err(Stop::Stopped),
            Err(error) => Err(Stop::Failed(error)),
        }
    }

    /// The next sample and the place of its last token, with which the one behind it begins.
    fn next_sample(&mut self) -> Result<(Sample, Cursor), Stop> {
        let sample_len = self.feed.options.seq_len + 1;
        let mut sample = Sample { tokens: Vec::with_capacity(sample_len), pieces: Vec::new() };
        if let Some((token, cursor, place)) = &self.last {
            sample.tokens.push(*token);
            sample.pieces.push(StreamPiece { place: *place, offset: cursor.token, length: 1 });
        }
        while sample.tokens.len() < sample_len {
            match self.take(&mut sample, sample_len) {
                Ok(()) => {}
                Err(Stop::End) if self.feed.options.keep_partial && sample.tokens.len() > 1 => break,
                Err(stop) => return Err(stop),
            }
        }
        match &self.last {
            Some((_, cursor, _)) => Ok((sample, cursor.clone())),
            None => Err(Stop::End), // not reached: a sample takes at least one token
        }
    }

    /// Takes tokens of the document at hand, as many as it has and the sample needs.
    fn take(&mut self, sample: &mut Sample, sample_len: usize) -> Result<(), Stop> {
        let is_used_up = self.window.as_ref().is_none_or(|window| self.document == window.documents.len());
        if is_used_up {
            self.next_window()?;
        }
        let Some(window) = &self.window else { return Ok(()) };
        let Some(document) = window.documents.get(self.document) else { return Ok(()) };
        let tokens = document.tokens();
        let count = (tokens.len() - self.token).min(sample_len - sample.tokens.len());
        let taken = &tokens[self.token..self.token + count];
        sample.tokens.extend_from_slice(taken);
        // The overlap with the sample before is the same run.
        match sample.pieces.last_mut().filter(|piece| {
            piece.place == document.place && piece.offset + piece.length == self.token && self.token > 0
        }) {
            Some(piece) => piece.length += count,
            None => sample.pieces.push(StreamPiece { place: document.place, offset: self.token, length: count }),
        }
        if let Some(&token) = taken.last() {
            let (window, token_at) = (Arc::clone(&window.start), self.token + count - 1);
            self.last = Some((token, Cursor { window, document: self.document, token: token_at }, document.place));
        }
        self.counts.tokens += count as u64;
        self.token += count;
        if self.token == tokens.len() {
            self.counts.documents = window.start.documents + self.document as u64 + 1;
            self.document += 1;
            self.token = 0;
        }
        Ok(())
    }
}

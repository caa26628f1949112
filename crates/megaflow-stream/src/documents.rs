//! What one thread makes of a block of records: documents of tokens.

use std::path::Path;

use megaflow_source::{Block, Outcome, ParseOptions, Place, Position, RejectReason, parse_block};
use megaflow_tokenize::{Encoder, Ends, Tokenizer};

use crate::{OnBadRecord, StreamError, StreamOptions, text_share};

/// Where a document lies in the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentPlace {
    /// Which input.
    pub source: usize,
    /// Line (counted from the byte `counted_from`) or row, from 1.
    pub number: u64,
    /// Byte at which the line begins in the unpacked input; 0 for a row.
    pub offset: u64,
    /// Byte at which counting of lines began.
    pub counted_from: u64,
}

/// A document of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Document {
    /// End of its tokens in the block; they begin where the document before it ends.
    pub(crate) end: usize,
    pub(crate) place: DocumentPlace,
    /// The record behind it.
    pub(crate) next: Position,
    /// Bad records between the document before it and this one.
    pub(crate) bad_before: u64,
}

/// The documents of a block.
#[derive(Debug, Default)]
pub(crate) struct EncodedBlock {
    pub(crate) tokens: Vec<u32>,
    pub(crate) documents: Vec<Document>,
    /// Bad records behind the last document.
    pub(crate) bad_behind: u64,
    /// What stops the stream behind the last document.
    pub(crate) failure: Option<StreamError>,
    /// The last bad record, for the message that there are too many.
    pub(crate) last_bad: Option<(String, RejectReason)>,
    pub(crate) text_bytes: u64,
}

/// One thread's state.
pub(crate) struct BlockEncoder<'a> {
    options: &'a StreamOptions,
    parse: ParseOptions,
    encoder: Encoder,
}

impl<'a> BlockEncoder<'a> {
    pub(crate) fn new(options: &'a StreamOptions, tokenizer: &Tokenizer) -> Result<Self, StreamError> {
        let parse = ParseOptions::new(std::slice::from_ref(&options.key), options.replace_invalid_utf8);
        Ok(Self { options, parse, encoder: tokenizer.encoder(options.encode)? })
    }

    /// Parses and tokenizes a block; `behind` is the place of the next one.
    pub(crate) fn encode(&mut self, source: usize, path: &Path, block: &Block, behind: Position) -> EncodedBlock {
        let Self { options, parse, encoder } = self;
        let mut done = EncodedBlock::default();
        let Ends { bos, eos } = encoder.ends();
        let mut bad = 0;
        parse_block(block, parse, |place, _, outcome| {
            let here = position_of(place);
            if let Some(last) = done.documents.last_mut().filter(|last| last.next == behind) {
                last.next = here;
            }
            let before = done.tokens.len();
            let mut is_empty = true;
            let reason = match outcome {
                Outcome::Blank => None,
                Outcome::Bad(reason) => Some(reason),
                Outcome::Record(fields) => {
                    let texts = fields.iter().flat_map(|field| field.texts()).map(AsRef::<str>::as_ref);
                    if options.part.as_ref().is_some_and(|part| !part.contains(&text_share(texts.clone()))) {
                        return true;
                    }
                    done.tokens.extend(bos);
                    let begin = done.tokens.len();
                    let encoded = texts.clone().try_for_each(|text| encoder.encode_part(text, &mut done.tokens));
                    is_empty = done.tokens.len() == begin;
                    done.text_bytes += texts.map(|text| text.len() as u64).sum::<u64>();
                    encoded.err().map(|error| RejectReason::NotTokenized { detail: error.to_string() })
                }
            };
            if reason.is_some() || is_empty {
                done.tokens.truncate(before);
            }
            if let Some(reason) = reason {
                bad += 1;
                if options.on_bad_record == OnBadRecord::Error {
                    let (path, place) = (path.to_owned(), place.to_string());
                    done.failure = Some(StreamError::BadRecord { path, place, reason });
                    return false;
                }
                done.last_bad = Some((place.to_string(), reason));
            } else if !is_empty {
                // An empty document has no tokens, so nothing of it could be seen.
                done.tokens.extend([eos, options.append_eod].into_iter().flatten());
                let place = place_in(source, place);
                done.documents.push(Document { end: done.tokens.len(), place, next: behind, bad_before: bad });
                bad = 0;
            }
            true
        });
        done.bad_behind = bad;
        done
    }
}

fn position_of(place: Place) -> Position {
    match place {
        Place::Line { number, offset, counted_from } => Position { offset, record: number, counted_from },
        Place::Row { number } => Position { offset: 0, record: number, counted_from: 0 },
    }
}

fn place_in(source: usize, place: Place) -> DocumentPlace {
    let Position { offset, record, counted_from } = position_of(place);
    DocumentPlace { source, number: record, offset, counted_from }
}

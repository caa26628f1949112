//! Many texts at once, on several threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::simd;
use crate::{EncodeOptions, Encoder, SpecialTokensInText, TokenizeError, Tokenizer};

/// Bytes of text that a thread takes at a time; longer texts are cut where that changes no id.
const CHUNK_BYTES: usize = 256 << 10;

/// Ids of several texts.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct EncodedBatch {
    /// The ids, one text after the other.
    pub ids: Vec<u32>,
    /// Where each text begins in `ids`, and the end of the last.
    pub offsets: Vec<i64>,
    /// Places where text spelled a special token.
    pub special_hits: u64,
}

/// Bytes of text for which room for one id is made at first; it is given back where ids are fewer.
const BYTES_AN_ID: usize = 4;

/// Room that stays behind the ids: encoding makes room for some words at once, and a batch of the same size shall fit.
const SPARE_IDS: usize = 1024;

impl EncodedBatch {
    /// An empty batch, in memory that may have been used before, with room for the ids of about `bytes` bytes of text.
    fn with_room(ids: Vec<u32>, bytes: usize) -> Self {
        let mut batch = Self { ids, offsets: vec![0], ..Self::default() };
        if batch.ids.capacity() < bytes / BYTES_AN_ID / 2 {
            simd::make_room(&mut batch.ids, bytes / BYTES_AN_ID);
        }
        batch
    }
}

/// A part of a text, and whether it is the first and the last one.
struct Piece<'a> {
    text: &'a str,
    begins_text: bool,
    ends_text: bool,
}

impl Piece<'_> {
    /// Appends the ids of the part, with what goes before and behind the text.
    fn encode(&self, encoder: &mut Encoder, ids: &mut Vec<u32>) -> Result<(), TokenizeError> {
        let ends = encoder.ends();
        ids.extend(ends.bos.filter(|_| self.begins_text));
        encoder.encode_part(self.text, ids)?;
        ids.extend(ends.eos.filter(|_| self.ends_text));
        Ok(())
    }
}

/// What a thread made of a chunk of pieces.
#[derive(Default)]
struct Chunk {
    ids: Vec<u32>,
    /// Where in `ids` texts end.
    ends: Vec<usize>,
    special_hits: u64,
}

/// The batch as far as chunks have come in without a gap. Ids are kept once: a chunk that is next goes to the end of the
/// batch, and only chunks that came too early wait.
#[derive(Default)]
struct Joined {
    batch: EncodedBatch,
    next: usize,
    waiting: BTreeMap<usize, Result<Chunk, TokenizeError>>,
    /// The error of the first text that has one.
    error: Option<TokenizeError>,
}

impl Joined {
    /// Takes the chunk of a place, or leaves it empty for the next use; `false` if no more are wanted.
    fn add(&mut self, place: usize, chunk: &mut Chunk, outcome: Result<(), TokenizeError>) -> bool {
        if place == self.next {
            self.append(outcome.map(|()| &*chunk));
            while let Some(waiting) = self.waiting.remove(&self.next) {
                match waiting {
                    Ok(chunk) => self.append(Ok(&chunk)),
                    Err(error) => self.append(Err(error)),
                }
            }
        } else {
            self.waiting.insert(place, outcome.map(|()| std::mem::take(chunk)));
        }
        self.error.is_none()
    }

    fn append(&mut self, chunk: Result<&Chunk, TokenizeError>) {
        self.next += 1;
        match chunk {
            _ if self.error.is_some() => {}
            Err(error) => self.error = Some(error),
            Ok(chunk) => {
                let before = self.batch.ids.len();
                simd::make_room(&mut self.batch.ids, chunk.ids.len());
                self.batch.ids.extend_from_slice(&chunk.ids);
                self.batch.offsets.extend(chunk.ends.iter().map(|end| (before + end) as i64));
                self.batch.special_hits += chunk.special_hits;
            }
        }
    }
}

impl Tokenizer {
    /// Ids of `texts`, the same for any number of threads.
    ///
    /// # Errors
    /// The error of the first text that cannot be encoded.
    pub fn encode_batch(
        &self,
        texts: &[&str],
        options: EncodeOptions,
        threads: usize,
    ) -> Result<EncodedBatch, TokenizeError> {
        let pieces = self.pieces(texts, options);
        let chunks = chunks_of(&pieces);
        let bytes = texts.iter().map(|text| text.len()).sum();
        let used = self.id_room().take(bytes);
        let used_capacity = used.capacity();
        let batch = EncodedBatch::with_room(used, bytes);
        let mut batch = match threads.min(chunks.len()) {
            0 | 1 => self.encode_alone(&pieces, options, batch)?,
            threads => self.encode_together(&chunks, options, threads, batch)?,
        };
        // Memory that was used before is left as it is, unless half of it is empty.
        if batch.ids.capacity() != used_capacity || batch.ids.len() < used_capacity / 2 {
            batch.ids.shrink_to(batch.ids.len() + (batch.ids.len() / 16).min(SPARE_IDS));
        }
        Ok(batch)
    }

    /// Encodes pieces on this thread, to the end of `batch`.
    fn encode_alone(
        &self,
        pieces: &[Piece<'_>],
        options: EncodeOptions,
        mut batch: EncodedBatch,
    ) -> Result<EncodedBatch, TokenizeError> {
        let mut encoder = self.encoder(options)?;
        for piece in pieces {
            piece.encode(&mut encoder, &mut batch.ids)?;
            if piece.ends_text {
                batch.offsets.push(batch.ids.len() as i64);
            }
        }
        batch.special_hits = encoder.special_hits();
        self.id_room().limit(encoder.free_bytes());
        self.put_back(encoder);
        Ok(batch)
    }

    /// Encodes chunks on several threads, to the end of `batch`.
    fn encode_together(
        &self,
        chunks: &[&[Piece<'_>]],
        options: EncodeOptions,
        threads: usize,
        batch: EncodedBatch,
    ) -> Result<EncodedBatch, TokenizeError> {
        let next = AtomicUsize::new(0);
        let joined = Mutex::new(Joined { batch, ..Joined::default() });
        thread::scope(|scope| {
            let work = || self.encode_chunks(chunks, options, &next, &joined);
            // Where the system has no more threads, fewer do it.
            let other = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
            let others: Vec<_> = (1..threads).map_while(other).collect();
            let own = work();
            others.into_iter().fold(own, |outcome, other| match other.join() {
                Ok(other) => outcome.and(other),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        let joined = joined.into_inner().unwrap_or_else(PoisonError::into_inner);
        joined.error.map_or(Ok(joined.batch), Err)
    }

    /// A text in parts whose ids, one after the other, are those of the whole: one part, if it is not long or cannot be cut.
    ///
    /// A special token or a token of the post-processor around each text would not survive a cut. BOS and EOS are no part of any.
    pub fn parts<'a>(&'a self, text: &'a str, options: EncodeOptions) -> impl Iterator<Item = &'a str> + 'a {
        let may_cut = !options.add_special_tokens && options.special_tokens_in_text == SpecialTokensInText::Text;
        let mut rest = Some(text);
        std::iter::from_fn(move || {
            let text = rest.take()?;
            let cut = (may_cut && text.len() > 2 * CHUNK_BYTES).then(|| self.cut_point(text, CHUNK_BYTES)).flatten();
            let (part, behind) = cut.map_or((text, None), |cut| (&text[..cut], Some(&text[cut..])));
            rest = behind;
            Some(part)
        })
    }

    /// The texts, long ones in parts.
    fn pieces<'a>(&'a self, texts: &[&'a str], options: EncodeOptions) -> Vec<Piece<'a>> {
        let mut pieces = Vec::with_capacity(texts.len());
        for &text in texts {
            let first = pieces.len();
            pieces.extend(self.parts(text, options).map(|text| Piece { text, begins_text: false, ends_text: false }));
            pieces[first].begins_text = true; // a text has at least one part
            pieces.last_mut().into_iter().for_each(|last| last.ends_text = true);
        }
        pieces
    }

    /// Encodes chunks, one after the other, until there are no more.
    fn encode_chunks(
        &self,
        chunks: &[&[Piece<'_>]],
        options: EncodeOptions,
        next: &AtomicUsize,
        joined: &Mutex<Joined>,
    ) -> Result<(), TokenizeError> {
        let mut encoder = self.encoder(options)?;
        let (mut made, mut has_failed) = (Chunk::default(), false);
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(place) else { break };
            let hits = encoder.special_hits();
            made.ids.clear();
            made.ends.clear();
            let outcome = chunk.iter().try_for_each(|piece| {
                piece.encode(&mut encoder, &mut made.ids)?;
                if piece.ends_text {
                    made.ends.push(made.ids.len());
                }
                Ok(())
            });
            made.special_hits = encoder.special_hits() - hits;
            has_failed = outcome.is_err();
            if !joined.lock().unwrap_or_else(PoisonError::into_inner).add(place, &mut made, outcome) {
                break;
            }
        }
        if !has_failed {
            self.id_room().limit(encoder.free_bytes());
            self.put_back(encoder);
        }
        Ok(())
    }
}

/// Runs of pieces of about [`CHUNK_BYTES`].
fn chunks_of<'p, 'a>(pieces: &'p [Piece<'a>]) -> Vec<&'p [Piece<'a>]> {
    let (mut chunks, mut begin, mut bytes) = (Vec::new(), 0, 0);
    for (place, piece) in pieces.iter().enumerate() {
        bytes += piece.text.len();
        if bytes >= CHUNK_BYTES {
            chunks.push(&pieces[begin..=place]);
            (begin, bytes) = (place + 1, 0);
        }
    }
    if begin < pieces.len() {
        chunks.push(&pieces[begin..]);
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        let mut vocab: std::collections::HashMap<String, u32> =
            (0..256).map(|byte| (char_of(byte).to_string(), byte)).collect();
        vocab.extend([("th".to_owned(), 256), ("the".to_owned(), 257), ("\u{120}the".to_owned(), 258)]);
        let vocab = serde_json::to_vec(&vocab).unwrap();
        Tokenizer::from_vocab_and_merges(&vocab, "t h\nth e\n\u{120} the\n").unwrap()
    }

    /// The letter by which a byte is written in a byte-level vocabulary.
    fn char_of(byte: u32) -> char {
        let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
        let others: Vec<u32> = (0..256).filter(|&b| !printable(b)).collect();
        let code = if printable(byte) { byte } else { 256 + others.iter().position(|&b| b == byte).unwrap() as u32 };
        char::from_u32(code).unwrap()
    }

    #[test]
    fn a_batch_equals_its_texts_one_by_one_whatever_the_threads() {
        let tokenizer = tokenizer();
        let long = "the then that bathe ".repeat(90_000);
        let texts = ["the", "", &long, "a the\n\nthe", &long[..700_000], " "];
        let mut expected = EncodedBatch { offsets: vec![0], ..EncodedBatch::default() };
        let mut encoder = tokenizer.encoder(EncodeOptions::default()).unwrap();
        for text in texts {
            encoder.encode(text, &mut expected.ids).unwrap();
            expected.offsets.push(expected.ids.len() as i64);
        }
        for threads in [1, 2, 5] {
            assert!(
                tokenizer.encode_batch(&texts, EncodeOptions::default(), threads).unwrap() == expected,
                "{threads}"
            );
        }
        assert!(tokenizer.cut_point(&long, CHUNK_BYTES).is_some(), "long texts are cut");
        assert_eq!(tokenizer.encode_batch(&[], EncodeOptions::default(), 3).unwrap().offsets, [0]);
    }

    #[test]
    fn a_text_that_gets_tokens_around_it_or_may_hold_special_ones_is_not_cut() {
        let (tokenizer, long, plain) = (tokenizer(), "the then ".repeat(90_000), EncodeOptions::default());
        let parts = |options| tokenizer.parts(&long, options).count();
        assert!(parts(plain) > 1);
        assert_eq!(parts(EncodeOptions { add_special_tokens: true, ..plain }), 1);
        for policy in [SpecialTokensInText::Encode, SpecialTokensInText::Error] {
            assert_eq!(parts(EncodeOptions { special_tokens_in_text: policy, ..plain }), 1);
        }
    }

    #[test]
    fn chunks_that_come_out_of_order_are_joined_in_order() {
        let chunk = |ids: &[u32]| Chunk { ids: ids.to_vec(), ends: vec![ids.len()], special_hits: 1 };
        let mut joined = Joined::default();
        assert!(joined.add(2, &mut chunk(&[5]), Ok(())));
        assert!(joined.add(1, &mut chunk(&[3, 4]), Ok(())));
        assert!(joined.batch.ids.is_empty());
        assert!(joined.add(0, &mut chunk(&[1, 2]), Ok(())));
        assert_eq!(
            (joined.batch.ids, joined.batch.offsets, joined.batch.special_hits),
            (vec![1, 2, 3, 4, 5], vec![2, 4, 5], 3)
        );
    }

    #[test]
    fn the_first_error_is_told() {
        let failed = |text: &str| Err(TokenizeError::invalid(text));
        let mut joined = Joined::default();
        assert!(joined.add(1, &mut Chunk::default(), failed("second")));
        assert!(!joined.add(0, &mut Chunk::default(), failed("first")));
        assert!(joined.error.unwrap().to_string().contains("first"));
    }
}

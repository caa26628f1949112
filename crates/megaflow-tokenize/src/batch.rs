//! Many texts at once, on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::{EncodeOptions, SpecialTokensInText, TokenizeError, Tokenizer};

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

/// A part of a text; `ends_text` says whether it is the last one.
struct Piece<'a> {
    text: &'a str,
    ends_text: bool,
}

/// What a thread made of a chunk of pieces: ids, and where in them texts end.
type Chunk = Result<(Vec<u32>, Vec<usize>, u64), TokenizeError>;

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
        let next = AtomicUsize::new(0);
        let threads = threads.clamp(1, chunks.len().max(1));
        let mut done: Vec<Option<Chunk>> = (0..chunks.len()).map(|_| None).collect();
        let results = thread::scope(|scope| {
            let work = || self.encode_chunks(&chunks, options, &next);
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut results = work();
            for other in others {
                match other.join() {
                    Ok(more) => results.extend(more),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            results
        });
        for (place, chunk) in results {
            done[place] = Some(chunk);
        }
        let mut batch = EncodedBatch { offsets: vec![0], ..EncodedBatch::default() };
        for chunk in done.into_iter().flatten() {
            let (ids, ends, hits) = chunk?;
            let before = batch.ids.len();
            batch.ids.extend_from_slice(&ids);
            batch.offsets.extend(ends.iter().map(|end| (before + end) as i64));
            batch.special_hits += hits;
        }
        Ok(batch)
    }

    /// The texts, long ones in parts. A special token or a token around each text would not survive a cut.
    fn pieces<'a>(&self, texts: &[&'a str], options: EncodeOptions) -> Vec<Piece<'a>> {
        let may_cut = !options.add_special_tokens && options.special_tokens_in_text == SpecialTokensInText::Text;
        let mut pieces = Vec::with_capacity(texts.len());
        for &text in texts {
            let mut rest = text;
            while may_cut && rest.len() > 2 * CHUNK_BYTES {
                let Some(cut) = self.cut_point(rest, CHUNK_BYTES) else { break };
                let (piece, after) = rest.split_at(cut);
                pieces.push(Piece { text: piece, ends_text: false });
                rest = after;
            }
            pieces.push(Piece { text: rest, ends_text: true });
        }
        pieces
    }

    fn encode_chunks(
        &self,
        chunks: &[&[Piece<'_>]],
        options: EncodeOptions,
        next: &AtomicUsize,
    ) -> Vec<(usize, Chunk)> {
        let mut encoder = match self.encoder(options) {
            Ok(encoder) => encoder,
            Err(error) => return vec![(0, Err(error))],
        };
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(place) else { return done };
            let hits = encoder.special_hits();
            let (mut ids, mut ends) = (Vec::new(), Vec::new());
            let encoded = chunk.iter().try_for_each(|piece| {
                encoder.encode(piece.text, &mut ids)?;
                if piece.ends_text {
                    ends.push(ids.len());
                }
                Ok(())
            });
            done.push((place, encoded.map(|()| (ids, ends, encoder.special_hits() - hits))));
        }
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
        let vocab = serde_json::to_string(&vocab).unwrap();
        let json =
            crate::TokenizerSpec::tokenizer_json_from_vocab_and_merges(vocab.as_bytes(), "t h\nth e\n\u{120} the\n");
        Tokenizer::from_tokenizer_json(&json.unwrap()).unwrap()
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
}

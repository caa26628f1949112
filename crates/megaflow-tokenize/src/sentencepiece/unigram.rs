//! SentencePiece's unigram model: the likeliest row of pieces, by dynamic programming over the whole text.
//!
//! Follows `unigram::Model::EncodeOptimized` of SentencePiece 0.2.3 in all that decides ids: scores are added up in 32-bit
//! floats from the start of the text; where a sum has passed 100,000, what it is there is taken off all sums that are still
//! open, which makes later roundings finer; of equal rows the one that was found first wins. Words are therefore not
//! cached: a sum that begins in another place rounds in another way.

use super::proto::{Model, PieceKind};
use crate::TokenizeError;
use crate::bpe::Trie;

/// Pieces that may match.
pub(crate) struct Unigram {
    trie: Trie,
    scores: Vec<f32>,
    unknown_score: f32,
    unknown_id: u32,
}

/// Best way to a place in the text.
#[derive(Clone, Copy)]
struct Best {
    id: u32,
    score: f32,
    start: u32,
}

const NOWHERE: u32 = u32::MAX;

/// A sum beyond this, either way, starts again from nothing.
const RESET: f32 = 100_000.0;

/// Memory that encoding reuses.
#[derive(Default)]
pub(crate) struct UnigramScratch {
    best: Vec<Best>,
    /// Id and length of each piece, last first.
    row: Vec<(u32, u32)>,
}

impl Unigram {
    /// From a model whose unknown piece has the given id. Texts of `pieces` have blanks for marks.
    pub(crate) fn new(model: &Model, texts: &[Vec<u8>], unknown_id: u32) -> Result<Self, TokenizeError> {
        let kinds = [PieceKind::Normal, PieceKind::UserDefined];
        let mut entries: Vec<(&[u8], u32)> = Vec::new();
        for (id, piece) in (0..).zip(&model.pieces) {
            if kinds.contains(&piece.kind) && !piece.text.contains(' ') {
                entries.push((&texts[id as usize], id));
            }
        }
        entries.sort_unstable();
        if entries.windows(2).any(|pair| pair[0].0 == pair[1].0)
            || entries.first().is_some_and(|(text, _)| text.is_empty())
        {
            return Err(TokenizeError::invalid("SentencePiece model: two pieces have the same text, or one has none"));
        }
        let normal = || model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal).map(|piece| piece.score);
        // The highest score starts from the smallest positive number, as it does there: below zero it does not count.
        let lowest = normal().fold(f32::MAX, f32::min);
        let score = |piece: &super::proto::Piece| match piece.kind {
            PieceKind::UserDefined => (0.1 * (piece.text.len() as f64 - 1.0)) as f32,
            _ => piece.score,
        };
        Ok(Self {
            trie: Trie::build(&entries)
                .ok_or_else(|| TokenizeError::invalid("SentencePiece model: too many pieces"))?,
            scores: model.pieces.iter().map(score).collect(),
            unknown_score: lowest - 10.0,
            unknown_id,
        })
    }

    /// Calls `each` with the id and the text of each piece.
    pub(crate) fn encode(&self, text: &[u8], scratch: &mut UnigramScratch, mut each: impl FnMut(u32, &[u8])) {
        let UnigramScratch { best, row } = scratch;
        best.clear();
        best.resize(text.len() + 1, Best { id: 0, score: 0.0, start: NOWHERE });
        let (mut at, mut furthest) = (0, 0);
        while at < text.len() {
            if best[at].score.abs() > RESET {
                let offset = best[at].score;
                best[at..=furthest].iter_mut().for_each(|place| place.score -= offset);
            }
            let so_far = best[at].score;
            let char_len =
                (1 + text[at + 1..].iter().take_while(|&&byte| byte & 0xC0 == 0x80).count()).min(text.len() - at);
            let mut has_single = false;
            let mut offer = |end: usize, id: u32, score: f32| {
                furthest = furthest.max(end);
                let place = &mut best[end];
                if place.start == NOWHERE || score > place.score {
                    *place = Best { id, score, start: at as u32 };
                }
            };
            self.trie.each_prefix(&text[at..], |id, len| {
                offer(at + len, id, self.scores[id as usize] + so_far);
                has_single |= len == char_len;
            });
            if !has_single {
                offer(at + char_len, self.unknown_id, self.unknown_score + so_far);
            }
            at += char_len;
        }
        row.clear();
        let mut end = text.len();
        while end > 0 {
            let Best { id, start, .. } = best[end];
            row.push((id, end as u32 - start));
            end = start as usize;
        }
        let mut start = 0;
        for &(id, len) in row.iter().rev() {
            each(id, &text[start..start + len as usize]);
            start += len as usize;
        }
    }
}

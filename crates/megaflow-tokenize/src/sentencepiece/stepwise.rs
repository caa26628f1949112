//! SentencePiece models outside the fast engines, followed step by step over the whole text: characters, words, and BPE
//! whose merges pass through pieces that may not appear (unused ones).
//!
//! Follows `character::Model`, `word::Model` and `bpe::Model` of SentencePiece 0.2.3. Unused pieces take part in merging and
//! are taken apart again at the end, each into the two halves that were last *looked at* anywhere in the text; that is why
//! no word can be encoded on its own, nor cached.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::build::bytes_of;
use super::engine::UserDefined;
use super::proto::{Model, ModelKind, PieceKind};
use crate::TokenizeError;

/// What becomes a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Characters,
    /// What lies between blanks, each blank with what follows it.
    Words,
    Merges,
}

/// Pieces by their text.
pub(crate) struct Stepwise {
    way: Way,
    /// Normal, user-defined and unused pieces by their text.
    ids: HashMap<Vec<u8>, u32>,
    /// For each id: later merges have larger numbers.
    lateness: Vec<u32>,
    is_unused: Vec<bool>,
    unknown_id: u32,
}

/// A part of the text between merges; an empty one has become part of its left neighbour.
struct Symbol {
    start: u32,
    len: u32,
    previous: u32,
    next: u32,
    is_frozen: bool,
}

const NONE: u32 = u32::MAX;

/// Deeper than this, SentencePiece takes no unused piece apart.
const DEEPEST: u32 = 100;

impl Stepwise {
    /// From a model whose unknown piece has the given id.
    pub(crate) fn new(model: &Model, unknown_id: u32) -> Result<Self, TokenizeError> {
        let way = match model.kind {
            ModelKind::Char => Way::Characters,
            ModelKind::Word => Way::Words,
            ModelKind::Bpe | ModelKind::Unigram => Way::Merges,
        };
        let mut ids = HashMap::new();
        for (id, piece) in (0u32..).zip(&model.pieces) {
            let can_match = matches!(piece.kind, PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused);
            // A blank cannot be met: in normalised text it is a mark.
            if can_match && !piece.text.contains(' ') && ids.insert(bytes_of(&piece.text), id).is_some() {
                let text = &piece.text;
                return Err(TokenizeError::invalid(format!("SentencePiece model: two pieces have the text {text:?}")));
            }
        }
        Ok(Self {
            way,
            ids,
            lateness: lateness(model),
            is_unused: model.pieces.iter().map(|piece| piece.kind == PieceKind::Unused).collect(),
            unknown_id,
        })
    }

    /// Calls `each` with the id and the text of each piece.
    pub(crate) fn encode(&self, text: &[u8], user_defined: Option<&UserDefined>, mut each: impl FnMut(u32, &[u8])) {
        match self.way {
            Way::Words => {
                let mut start = 0;
                for at in (1..text.len()).filter(|&at| text[at] == b' ').chain([text.len()]) {
                    if at > start {
                        each(self.id_of(&text[start..at]), &text[start..at]);
                    }
                    start = at;
                }
            }
            Way::Characters => {
                for symbol in symbols(text, user_defined) {
                    let part = symbol.part(text);
                    each(self.id_of(part), part);
                }
            }
            Way::Merges => self.merge(text, symbols(text, user_defined), &mut each),
        }
    }

    /// The piece of this text, used or not.
    fn any_id(&self, text: &[u8]) -> u32 {
        self.ids.get(text).copied().unwrap_or(self.unknown_id)
    }

    /// The piece of this text; the unknown one if there is none that may appear.
    fn id_of(&self, text: &[u8]) -> u32 {
        let id = self.any_id(text);
        if self.is_unused[id as usize] { self.unknown_id } else { id }
    }

    fn merge(&self, text: &[u8], mut symbols: Vec<Symbol>, each: &mut impl FnMut(u32, &[u8])) {
        let mut heap = BinaryHeap::new();
        // Where each unused piece was last seen to be cut in two.
        let mut halves: HashMap<u32, u32> = HashMap::new();
        let mut offer = |heap: &mut BinaryHeap<_>, symbols: &[Symbol], left: u32| {
            let right = symbols[left as usize].next;
            if right == NONE || symbols[left as usize].is_frozen || symbols[right as usize].is_frozen {
                return;
            }
            let (first, second) = (&symbols[left as usize], &symbols[right as usize]);
            let len = first.len + second.len;
            let joined = &text[first.start as usize..(first.start + len) as usize];
            if let Some(&id) = self.ids.get(joined) {
                heap.push(Reverse((self.lateness[id as usize], left, right, len)));
                if self.is_unused[id as usize] {
                    halves.insert(id, first.len);
                }
            }
        };
        for left in 0..symbols.len() as u32 {
            offer(&mut heap, &symbols, left);
        }
        while let Some(Reverse((_, left, right, len))) = heap.pop() {
            let lens = (symbols[left as usize].len, symbols[right as usize].len);
            if lens.0 == 0 || lens.1 == 0 || lens.0 + lens.1 != len {
                continue; // one of the two has changed since
            }
            let after = symbols[right as usize].next;
            symbols[right as usize].len = 0;
            symbols[left as usize].len = len;
            symbols[left as usize].next = after;
            if after != NONE {
                symbols[after as usize].previous = left;
            }
            let before = symbols[left as usize].previous;
            if before != NONE {
                offer(&mut heap, &symbols, before);
            }
            offer(&mut heap, &symbols, left);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            self.take_apart(symbol.part(text), &halves, each);
        }
    }

    /// Passes a part on, an unused piece as its halves.
    fn take_apart(&self, part: &[u8], halves: &HashMap<u32, u32>, each: &mut impl FnMut(u32, &[u8])) {
        let mut open = vec![(part, 0)];
        while let Some((part, depth)) = open.pop() {
            let id = self.any_id(part);
            if depth > DEEPEST || !self.is_unused[id as usize] {
                each(id, part);
            } else if let Some(&cut) = halves.get(&id) {
                let (left, right) = part.split_at(cut as usize);
                open.extend([(right, depth + 1), (left, depth + 1)]);
            } else {
                each(self.unknown_id, part);
            }
        }
    }
}

impl Symbol {
    fn part<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.start as usize..(self.start + self.len) as usize]
    }
}

/// The characters of a text, and in it the user-defined pieces, which are never merged.
fn symbols(text: &[u8], user_defined: Option<&UserDefined>) -> Vec<Symbol> {
    let mut symbols = Vec::with_capacity(text.len());
    let mut add = |start: usize, end: usize, is_frozen: bool| {
        let index = symbols.len() as u32;
        let (start, len) = (start as u32, (end - start) as u32);
        symbols.push(Symbol { start, len, previous: index.wrapping_sub(1), next: index + 1, is_frozen });
    };
    let mut at = 0;
    let found = user_defined.map(|pieces| pieces.find(text)).unwrap_or_default();
    for (start, end) in found.into_iter().chain([(text.len(), text.len())]) {
        while at < start {
            let len = 1 + text[at + 1..start].iter().take_while(|&&byte| byte & 0xC0 == 0x80).count();
            add(at, at + len, false);
            at += len;
        }
        if start < end {
            add(start, end, true);
        }
        at = end;
    }
    if let Some(last) = symbols.last_mut() {
        last.next = NONE;
    }
    symbols
}

/// Numbers that are the smaller the higher a score is, equal for equal scores.
fn lateness(model: &Model) -> Vec<u32> {
    let score = |id: usize| model.pieces[id].score;
    let mut by_score: Vec<usize> = (0..model.pieces.len()).collect();
    by_score.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut lateness = vec![0; by_score.len()];
    let mut number = 0;
    for (place, &id) in by_score.iter().enumerate() {
        number += u32::from(place > 0 && score(by_score[place - 1]).total_cmp(&score(id)).is_ne());
        lateness[id] = number;
    }
    lateness
}

#[cfg(test)]
mod tests {
    use super::super::proto::Piece;
    use super::*;

    fn model(kind: ModelKind, pieces: &[(&str, f32, PieceKind)]) -> Stepwise {
        let unknown = Piece { text: "<unk>".into(), score: 0.0, kind: PieceKind::Unknown };
        let pieces = pieces.iter().map(|&(text, score, kind)| Piece { text: text.into(), score, kind });
        let model = Model {
            pieces: std::iter::once(unknown).chain(pieces).collect(),
            kind,
            byte_fallback: false,
            space_is_suffix: false,
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
            end_names: ["<s>".to_owned(), "</s>".to_owned()],
        };
        Stepwise::new(&model, 0).unwrap()
    }

    fn ids(model: &Stepwise, text: &str) -> Vec<u32> {
        let (mut ids, mut parts) = (Vec::new(), Vec::new());
        model.encode(text.as_bytes(), None, |id, part| {
            ids.push(id);
            parts.extend_from_slice(part);
        });
        assert_eq!(parts, text.as_bytes(), "the parts are the text");
        ids
    }

    #[test]
    fn an_unused_piece_is_a_step_on_the_way_and_is_taken_apart_at_the_end() {
        use PieceKind::{Normal, Unused};
        let pieces = [
            ("a", -9.0, Normal),
            ("b", -9.0, Normal),
            ("c", -9.0, Normal),
            ("ab", -1.0, Unused),
            ("abc", -2.0, Normal),
        ];
        let model = model(ModelKind::Bpe, &pieces);
        assert_eq!(ids(&model, "abc"), [5]);
        assert_eq!(ids(&model, "aab"), [1, 1, 2]);
        assert_eq!(ids(&model, "abab"), [1, 2, 1, 2]);
        assert_eq!(ids(&model, "azb"), [1, 0, 2]);
    }

    #[test]
    fn halves_are_those_that_were_looked_at_last_in_the_whole_text() {
        use PieceKind::{Normal, Unused};
        // "abc" is reached as ab + c where "ab" merges first, and as a + bc where only "bc" can.
        let pieces = [
            ("a", -9.0, Normal),
            ("b", -9.0, Normal),
            ("c", -9.0, Normal),
            ("ab", -1.0, Normal),
            ("bc", -2.0, Normal),
            ("abc", -3.0, Unused),
        ];
        let model = model(ModelKind::Bpe, &pieces);
        assert_eq!(ids(&model, "abc"), [4, 3]);
    }

    #[test]
    fn words_and_characters() {
        use PieceKind::{Normal, Unused};
        let words = model(ModelKind::Word, &[("\u{2581}a", -1.0, Normal), ("\u{2581}b", -1.0, Unused)]);
        assert_eq!(ids(&words, " a b a"), [1, 0, 1]);
        assert_eq!(ids(&words, "  a"), [0, 1]);
        let characters = model(ModelKind::Char, &[("a", -1.0, Normal), ("\u{e9}", -1.0, Normal), ("b", -1.0, Unused)]);
        assert_eq!(ids(&characters, "a\u{e9}bz"), [1, 2, 0, 0]);
    }

    #[test]
    fn two_pieces_of_one_text_are_an_error() {
        let piece = Piece { text: "a".into(), score: 0.0, kind: PieceKind::Normal };
        let mut model = Model::read(&[0x0A, 8, 0x0A, 1, b'a', 0x15, 0, 0, 0x80, 0xBF]).unwrap();
        model.pieces.push(piece);
        assert!(Stepwise::new(&model, 0).is_err());
    }
}

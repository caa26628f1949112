//! Longest token that begins a text: a double-array trie over bytes.
//!
//! Double arrays: J. Aoe, "An efficient digital search algorithm by using a double-array structure", 1989. Each node is
//! one word: base of its children, the byte that leads to it, and the token that ends there. No two nodes share a base,
//! so that the byte alone proves that a slot belongs to the node.

use crate::simd::Fixed;

/// Bit of a slot that holds a node.
const USED: u64 = 1 << 31;
/// Place of the number of the token that ends at a node, plus 1.
const VALUE: u32 = 32;
/// Bases are below this.
const MAX_BASE: usize = 1 << 23;
/// No token.
pub(crate) const NONE: u32 = u32::MAX;

/// A set of byte strings, each with a number.
pub(crate) struct Trie {
    /// `value << VALUE | USED | base << 8 | label`; a free slot is 0.
    nodes: Fixed<u64>,
    /// Nodes that first bytes lead to, or 0.
    first: Vec<u64>,
    /// Nodes that the first two bytes lead to, or 0.
    second: Vec<u64>,
}

const ROOT: usize = 1;

impl Trie {
    /// From strings in ascending order without repetition; none is empty. `None` if they are too many for the layout.
    pub(crate) fn build(entries: &[(&[u8], u32)]) -> Option<Self> {
        let mut builder = Builder {
            nodes: vec![0; 1024],
            used_bases: vec![false; 1024],
            taken: vec![0; 1024 / 64],
            first_free: 256, // bases of at least 256: the slots below belong to no child
        };
        builder.taken[..256 / 64].fill(u64::MAX);
        builder.place(ROOT, entries)?;
        let mut nodes = builder.nodes;
        // Behind the last node nothing is looked up but children that are not there.
        let used = nodes.iter().rposition(|&node| node != 0).unwrap_or(0) + 1;
        nodes.resize(used.next_multiple_of(256) + 256, 0);
        let mut trie = Self { nodes: nodes.into(), first: vec![0; 1 << 8], second: vec![0; 1 << 16] };
        for first in 0..=255u8 {
            let Some(node) = trie.step(trie.nodes[ROOT], first) else { continue };
            trie.first[usize::from(first)] = node;
            for second in 0..=255u8 {
                trie.second[usize::from(first) | usize::from(second) << 8] = trie.step(node, second).unwrap_or(0);
            }
        }
        Some(trie)
    }

    /// The node that a byte leads to.
    #[inline]
    fn step(&self, node: u64, byte: u8) -> Option<u64> {
        let child = self.nodes[(node >> 8 & (MAX_BASE as u64 - 1)) as usize ^ usize::from(byte)];
        (child & (USED | 0xFF) == USED | u64::from(byte)).then_some(child)
    }

    /// Calls `each` with the number and the length of each string that begins `text`, shortest first.
    #[inline]
    pub(crate) fn each_prefix(&self, text: &[u8], mut each: impl FnMut(u32, usize)) {
        let mut node = self.nodes[ROOT];
        for (index, &byte) in text.iter().enumerate() {
            match self.step(node, byte) {
                Some(child) => node = child,
                None => return,
            }
            if node >> VALUE != 0 {
                each((node >> VALUE) as u32 - 1, index + 1);
            }
        }
    }

    /// Number and length of the longest string that begins `text`, or [`NONE`] and 1.
    #[inline]
    pub(crate) fn longest(&self, text: &[u8]) -> (u32, usize) {
        let [first, rest @ ..] = text else { return (NONE, 1) };
        let (mut value, mut len) = (self.first[usize::from(*first)] >> VALUE, 1);
        let [second, rest @ ..] = rest else { return ((value as u32).wrapping_sub(1), 1) };
        let mut node = self.second[usize::from(*first) | usize::from(*second) << 8];
        let mut at = 2;
        let mut rest = rest.iter();
        while node != 0 {
            (value, len) = if node >> VALUE != 0 { (node >> VALUE, at) } else { (value, len) };
            at += 1;
            node = rest.next().and_then(|&byte| self.step(node, byte)).unwrap_or(0);
        }
        ((value as u32).wrapping_sub(1), len)
    }
}

struct Builder {
    nodes: Vec<u64>,
    used_bases: Vec<bool>,
    /// One bit for each slot that is taken.
    taken: Vec<u64>,
    first_free: usize,
}

impl Builder {
    /// Places the children of `node`, whose strings (less what leads to the node) are `entries`.
    fn place(&mut self, node: usize, entries: &[(&[u8], u32)]) -> Option<()> {
        let mut stack = vec![(node, 0usize, 0..entries.len())];
        let mut children: Vec<(u8, std::ops::Range<usize>)> = Vec::new();
        while let Some((node, depth, mut range)) = stack.pop() {
            let mut word = self.nodes[node] & (USED | 0xFF);
            if entries[range.clone()].first().is_some_and(|(text, _)| text.len() == depth) {
                word |= (u64::from(entries[range.start].1) + 1) << VALUE;
                range.start += 1;
            }
            children.clear();
            while range.start < range.end {
                let byte = entries[range.start].0[depth];
                let end = range.start + entries[range.clone()].partition_point(|(text, _)| text[depth] == byte);
                children.push((byte, range.start..end));
                range.start = end;
            }
            if !children.is_empty() {
                let base = self.find_base(&children)?;
                self.used_bases[base] = true;
                word |= (base as u64) << 8;
                for (byte, range) in children.drain(..) {
                    let child = base ^ usize::from(byte);
                    self.nodes[child] = USED | u64::from(byte);
                    self.taken[child / 64] |= 1 << (child % 64);
                    stack.push((child, depth + 1, range));
                }
            }
            self.nodes[node] = word;
        }
        Some(())
    }

    fn find_base(&mut self, children: &[(u8, std::ops::Range<usize>)]) -> Option<usize> {
        let first = usize::from(children[0].0);
        let mut free = self.first_free;
        let mut tried = 0;
        loop {
            if free + 512 >= self.nodes.len() {
                let len = self.nodes.len() * 2;
                self.nodes.resize(len, 0);
                self.used_bases.resize(len, false);
                self.taken.resize(len / 64, 0);
            }
            let open = !self.taken[free / 64] & u64::MAX << (free % 64);
            if open == 0 {
                free = (free / 64 + 1) * 64;
                continue;
            }
            free = free / 64 * 64 + open.trailing_zeros() as usize;
            let base = free ^ first;
            if base >= MAX_BASE {
                return None;
            }
            let is_free = |slot: usize| self.taken[slot / 64] >> (slot % 64) & 1 == 0;
            if !self.used_bases[base] && children.iter().all(|(byte, _)| is_free(base ^ usize::from(*byte))) {
                return Some(base);
            }
            tried += 1;
            // What stays free behind is given up after a while: search time is bounded, the waste is small.
            if tried == 64 {
                self.first_free = free;
                tried = 0;
            }
            free += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_prefix_equals_a_linear_search() {
        let mut state = 1u64;
        let mut next = move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let mut strings: Vec<Vec<u8>> = (0..if cfg!(miri) { 200 } else { 5000 })
            .map(|_| (0..1 + next(7)).map(|_| [0, 1, b'a', b'b', 200, 255][next(6) as usize]).collect())
            .collect();
        strings.extend((0..=255u8).map(|byte| vec![byte]));
        strings.sort();
        strings.dedup();
        let entries: Vec<(&[u8], u32)> = strings.iter().zip(0..).map(|(text, id)| (text.as_slice(), id)).collect();
        let trie = Trie::build(&entries).unwrap();
        for _ in 0..if cfg!(miri) { 200 } else { 5000 } {
            let text: Vec<u8> = (0..1 + next(9)).map(|_| [0, 1, b'a', b'b', 200, 255][next(6) as usize]).collect();
            let begins = strings.iter().zip(0..).filter(|(s, _)| text.starts_with(s));
            let (string, id) = begins.max_by_key(|(s, _)| s.len()).unwrap();
            assert_eq!(trie.longest(&text), (id, string.len()), "{text:?}");
        }
    }
}

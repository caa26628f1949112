//! Longest token that begins a text: a double-array trie over bytes.
//!
//! Double arrays: J. Aoe, "An efficient digital search algorithm by using a double-array structure", 1989. Each node is
//! one word: base of its children, the byte that leads to it, and whether a token ends there. No two nodes share a base,
//! so that the byte alone proves that a slot belongs to the node.

/// Bit of a node at which a token ends.
const TERMINAL: u32 = 1 << 31;
/// Bases are below this.
const MAX_BASE: usize = 1 << 23;
/// No token.
pub(crate) const NONE: u32 = u32::MAX;

/// A set of byte strings, each with a number.
pub(crate) struct Trie {
    /// `TERMINAL | base << 8 | label`; a free slot is 0.
    nodes: Vec<u32>,
    /// Number of the string that ends at a node.
    values: Vec<u32>,
    /// Node reached by the first two bytes, or 0.
    second: Vec<u32>,
}

const ROOT: usize = 1;

impl Trie {
    /// From strings in ascending order without repetition; none is empty. `None` if they are too many for the layout.
    pub(crate) fn build(entries: &[(&[u8], u32)]) -> Option<Self> {
        let mut builder = Builder {
            trie: Self { nodes: vec![0; 1024], values: vec![NONE; 1024], second: vec![0; 1 << 16] },
            used_bases: vec![false; 1024],
            taken: vec![0; 1024 / 64],
            first_free: 256, // bases of at least 256: the slots below belong to no child
        };
        builder.taken[..256 / 64].fill(u64::MAX);
        builder.trie.nodes[0] = 1; // never the child of a leaf, whose base is 0
        builder.place(ROOT, entries)?;
        let mut trie = builder.trie;
        trie.nodes.resize(trie.nodes.len().next_multiple_of(256) + 256, 0);
        for pair in 0..1usize << 16 {
            let first = trie.step(ROOT, (pair & 0xFF) as u8);
            trie.second[pair] = first.and_then(|node| trie.step(node, (pair >> 8) as u8)).unwrap_or(0) as u32;
        }
        Some(trie)
    }

    #[inline]
    fn step(&self, node: usize, byte: u8) -> Option<usize> {
        let child = (self.nodes[node] >> 8 & (MAX_BASE as u32 - 1)) as usize ^ usize::from(byte);
        match self.nodes.get(child) {
            Some(&word) if word & 0xFF == u32::from(byte) && word != 0 => Some(child),
            _ => None,
        }
    }

    /// Calls `each` with the number and the length of each string that begins `text`, shortest first.
    #[inline]
    pub(crate) fn each_prefix(&self, text: &[u8], mut each: impl FnMut(u32, usize)) {
        let mut node = ROOT;
        for (index, &byte) in text.iter().enumerate() {
            match self.step(node, byte) {
                Some(child) => node = child,
                None => return,
            }
            if self.nodes[node] & TERMINAL != 0 {
                each(self.values[node], index + 1);
            }
        }
    }

    /// Number of the longest string that begins `text`, or [`NONE`].
    #[inline]
    pub(crate) fn longest(&self, text: &[u8]) -> u32 {
        let (mut node, mut at, mut last);
        match *text {
            [] => return NONE,
            [first] => return self.step(ROOT, first).map_or(NONE, |node| self.values[node]),
            [first, second, ..] => {
                node = self.second[usize::from(first) | usize::from(second) << 8] as usize;
                if node == 0 {
                    return self.step(ROOT, first).map_or(NONE, |node| self.values[node]);
                }
                last = if self.nodes[node] & TERMINAL != 0 { node } else { 0 };
                at = 2;
            }
        }
        let mut word = self.nodes[node];
        while let Some(&byte) = text.get(at) {
            let child = (word >> 8 & (MAX_BASE as u32 - 1)) as usize ^ usize::from(byte);
            word = self.nodes[child];
            if word & 0xFF != u32::from(byte) || word == 0 {
                break;
            }
            node = child;
            last = if word & TERMINAL != 0 { node } else { last };
            at += 1;
        }
        if last == 0 { self.step(ROOT, text[0]).map_or(NONE, |node| self.values[node]) } else { self.values[last] }
    }
}

struct Builder {
    trie: Trie,
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
            let mut word = self.trie.nodes[node] & 0xFF;
            if entries[range.clone()].first().is_some_and(|(text, _)| text.len() == depth) {
                word |= TERMINAL;
                self.trie.values[node] = entries[range.start].1;
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
                word |= (base as u32) << 8;
                for (byte, range) in children.drain(..) {
                    let child = base ^ usize::from(byte);
                    self.trie.nodes[child] = u32::from(byte);
                    self.taken[child / 64] |= 1 << (child % 64);
                    stack.push((child, depth + 1, range));
                }
            }
            self.trie.nodes[node] = word;
        }
        Some(())
    }

    fn find_base(&mut self, children: &[(u8, std::ops::Range<usize>)]) -> Option<usize> {
        let first = usize::from(children[0].0);
        let mut free = self.first_free;
        let mut tried = 0;
        loop {
            if free + 512 >= self.trie.nodes.len() {
                let len = self.trie.nodes.len() * 2;
                self.trie.nodes.resize(len, 0);
                self.trie.values.resize(len, NONE);
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
        let mut strings: Vec<Vec<u8>> = (0..5000)
            .map(|_| (0..1 + next(7)).map(|_| [0, 1, b'a', b'b', 200, 255][next(6) as usize]).collect())
            .collect();
        strings.extend((0..=255u8).map(|byte| vec![byte]));
        strings.sort();
        strings.dedup();
        let entries: Vec<(&[u8], u32)> = strings.iter().zip(0..).map(|(text, id)| (text.as_slice(), id)).collect();
        let trie = Trie::build(&entries).unwrap();
        for _ in 0..5000 {
            let text: Vec<u8> = (0..1 + next(9)).map(|_| [0, 1, b'a', b'b', 200, 255][next(6) as usize]).collect();
            let expected =
                strings.iter().zip(0..).filter(|(s, _)| text.starts_with(s)).max_by_key(|(s, _)| s.len()).unwrap().1;
            assert_eq!(trie.longest(&text), expected, "{text:?}");
        }
    }
}

//! The order that needs no index: samples cut in file order, handed out by a computed permutation.

use std::ops::Range;
use std::sync::Arc;

use megaflow_core::{KeyedPermutation, Piece, SampleError, SampleLayout, SampleSource, TokensMut, mix};
use megaflow_indexed::IndexedDataset;

use crate::error::BuildError;
use crate::flat::FlatTokens;
use crate::gather::{Gather, add_piece, mark_padding, watched};
use crate::split::{SplitMatrix, SplitName};
use crate::window::Window;

/// Sequences that a window of the document shuffle holds on average.
const WINDOW_SEQUENCES: u64 = 256;
/// Samples of a window, at least and at most.
const WINDOW_SAMPLES: Range<u64> = 8..4096;

/// What is shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    /// Samples: documents that lie side by side in the file share a sample.
    Samples,
    /// Documents too: those of a window (some 256 of them) are shuffled before they are cut into samples.
    Documents,
}

/// How a pair is cut into samples without an index.
#[derive(Debug, Clone, PartialEq)]
pub struct InstantConfig {
    /// Tokens of a sample, without the extra token.
    pub seq_len: usize,
    /// Samples, by repeating the sequences as often as it takes; `None` is one epoch.
    pub num_samples: Option<u64>,
    /// Seed of the permutations.
    pub seed: u64,
    /// Whether samples hold one token more, whose shift makes the labels.
    pub add_extra_token: bool,
    /// With one epoch only: whether the tokens left over at the end make one more, shorter sample.
    pub keep_partial: bool,
    /// What is shuffled.
    pub shuffle: Shuffle,
    /// Shares of the splits.
    pub matrix: SplitMatrix,
    /// The split to read.
    pub split: SplitName,
    /// Id that fills up a sample shorter than the others.
    pub pad_id: i64,
}

/// Samples cut in file order and handed out in a keyed permutation.
///
/// The tokens of the split are taken as an endless run, turn after turn. Sample k of the cut holds the `seq_len` tokens
/// from `k * seq_len` on (and the extra one behind them). Epoch e is made of the samples that begin in turn e; each has a
/// permutation of its own. So every token is delivered once in every turn, the cuts fall elsewhere in each, and a longer
/// run never reorders a shorter one.
#[derive(Debug)]
pub struct InstantDataset {
    flat: FlatTokens,
    seq_len: u64,
    extra: u64,
    num_samples: u64,
    seed: u64,
    pad_id: i64,
    /// One epoch: nothing is repeated, and the samples are counted here.
    is_single: bool,
    /// Samples of a window in which documents are shuffled.
    window: Option<u64>,
}

/// One sample of the cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    epoch: u64,
    /// Samples of the cut that belong to the epoch: first, and behind the last.
    first: u64,
    behind: u64,
    /// The sample.
    number: u64,
}

impl InstantDataset {
    /// Opens the split. Takes the same time and memory at any size.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of range, samples are asked of a split without tokens, or an end of the split
    /// is damaged.
    pub fn new(indexed: Arc<IndexedDataset>, config: &InstantConfig) -> Result<Self, BuildError> {
        let seq_len = config.seq_len as u64;
        if seq_len == 0 || i32::try_from(seq_len).is_err() {
            let found = i128::from(seq_len);
            return Err(BuildError::BadSetting { setting: "seq_len", expected: "1 to 2147483647", found });
        }
        let num_sequences = indexed.num_sequences();
        let sequences = config.matrix.sequences(config.split, num_sequences).unwrap_or(0..0);
        let dataset = indexed.prefix().display().to_string();
        let flat = FlatTokens::new(indexed, sequences.clone())?;
        match config.num_samples {
            Some(num_samples @ 1..) if sequences.is_empty() => {
                return Err(BuildError::EmptySplit { dataset, split: config.split, num_sequences, num_samples });
            }
            Some(num_samples @ 1..) if flat.len() == 0 => {
                return Err(BuildError::NoTokens { num_sequences: sequences.len(), num_samples });
            }
            _ => {}
        }
        let extra = u64::from(config.add_extra_token);
        let whole = flat.len().saturating_sub(extra);
        let one_epoch = if config.keep_partial { whole.div_ceil(seq_len) } else { whole / seq_len };
        let window = match config.shuffle {
            Shuffle::Samples => None,
            Shuffle::Documents => {
                let mean = (flat.len() / sequences.len().max(1) as u64).max(1);
                Some((WINDOW_SEQUENCES.saturating_mul(mean) / seq_len).clamp(WINDOW_SAMPLES.start, WINDOW_SAMPLES.end))
            }
        };
        Ok(Self {
            flat,
            seq_len,
            extra,
            num_samples: config.num_samples.unwrap_or(one_epoch),
            seed: config.seed,
            pad_id: config.pad_id,
            is_single: config.num_samples.is_none(),
            window,
        })
    }

    /// The pair.
    pub fn indexed(&self) -> &Arc<IndexedDataset> {
        self.flat.indexed()
    }

    /// Sequences of the split.
    pub fn sequences(&self) -> Range<usize> {
        self.flat.sequences()
    }

    /// Tokens of the split.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.flat.len()
    }

    /// Samples of a window of the document shuffle.
    pub fn window_samples(&self) -> Option<u64> {
        self.window
    }

    /// Turns that the samples take, begun ones included.
    pub fn num_epochs(&self) -> u64 {
        let tokens = u128::from(self.num_samples) * u128::from(self.seq_len);
        if self.is_single { 1 } else { tokens.div_ceil(u128::from(self.flat.len().max(1))).max(1) as u64 }
    }

    /// The sample of the cut that is handed out at position `index`.
    #[inline]
    fn cut(&self, index: u64) -> Result<Cut, SampleError> {
        if index >= self.num_samples {
            return Err(SampleError::OutOfRange { index, num_samples: self.num_samples });
        }
        let (step, len) = (u128::from(self.seq_len), u128::from(self.flat.len().max(1)));
        let (epoch, first, behind) = if self.is_single {
            (0, 0, self.num_samples)
        } else {
            let epoch = u128::from(index) * step / len;
            let start = |epoch: u128| (epoch * len).div_ceil(step) as u64;
            (epoch as u64, start(epoch), start(epoch + 1))
        };
        let order = KeyedPermutation::new(self.seed, epoch, behind - first);
        Ok(Cut { epoch, first, behind, number: first + order.get(index - first) })
    }

    /// Begin of a sample of the cut in its turn.
    #[inline]
    fn begin(&self, number: u64) -> u64 {
        (u128::from(number) * u128::from(self.seq_len) % u128::from(self.flat.len().max(1))) as u64
    }

    /// Tokens of a sample that begins at `begin`: fewer than all at the end of a single epoch.
    #[inline]
    fn tokens_from(&self, begin: u64) -> u64 {
        let wanted = self.seq_len + self.extra;
        if self.is_single { wanted.min(self.flat.len() - begin) } else { wanted }
    }

    /// Calls `visit` with the runs of tokens that make a sample: begin in the turn, and how many, across the end of the
    /// turn if need be.
    #[inline]
    fn for_each_run(
        &self,
        index: u64,
        mut visit: impl FnMut(u64, u64) -> Result<(), SampleError>,
    ) -> Result<(), SampleError> {
        let cut = self.cut(index)?;
        let Some(window) = self.window else {
            let begin = self.begin(cut.number);
            return visit(begin, self.tokens_from(begin));
        };
        self.for_each_window_run(index, cut, window, &mut visit)
    }

    /// The same where documents are shuffled: the parts of sequences that a window holds, in an order of its own, are
    /// cut into its samples.
    fn for_each_window_run(
        &self,
        index: u64,
        cut: Cut,
        window: u64,
        visit: &mut dyn FnMut(u64, u64) -> Result<(), SampleError>,
    ) -> Result<(), SampleError> {
        let first = cut.first + (cut.number - cut.first) / window * window;
        let behind = (first + window).min(cut.behind);
        let begin = self.begin(first);
        let whole = (behind - first) * self.seq_len;
        let tokens = if self.is_single { whole.min(self.flat.len() - begin) } else { whole };
        let key = mix(self.seed ^ mix(cut.epoch) ^ mix(!first));
        let mut parts = Window::new(&self.flat, index, begin..begin + tokens, key)?;
        let mut skip = (cut.number - first) * self.seq_len;
        // The partial sample at the end of a single epoch has no token behind it.
        let mut missing = if tokens == whole { self.seq_len + self.extra } else { self.tokens_from(begin + skip) };
        while let Some(part) = parts.draw() {
            let taken = part.tokens.saturating_sub(skip).min(missing);
            if taken > 0 {
                visit(part.begin + skip, taken)?;
            }
            skip = skip.saturating_sub(part.tokens);
            missing -= taken;
            if missing == 0 {
                return Ok(());
            }
        }
        // The extra token of a window's last sample: where a document was cut its next token, else the window's first.
        match (parts.drawn().first(), parts.drawn().last()) {
            (_, Some(last)) if last.is_cut => visit(last.begin + last.tokens, missing),
            (Some(first), _) => visit(first.begin, missing),
            _ => Ok(()),
        }
    }
}

impl SampleSource for InstantDataset {
    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn sample_len(&self) -> usize {
        (self.seq_len + self.extra) as usize
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.read_into(index, TokensMut::I64(out))
    }

    fn read_into(&self, index: u64, out: TokensMut<'_>) -> Result<(), SampleError> {
        self.read_counted(index, out).map(|_| ())
    }

    fn read_counted(&self, index: u64, out: TokensMut<'_>) -> Result<usize, SampleError> {
        watched(self.flat.indexed(), index, || {
            let mut gather = Gather::new(index, self.flat.indexed().dtype(), out);
            self.for_each_run(index, |mut begin, mut count| {
                while count > 0 {
                    let taken = count.min(self.flat.len() - begin);
                    gather.push(self.flat.run(begin, taken))?;
                    count -= taken;
                    begin = 0;
                }
                Ok(())
            })?;
            gather.finish(self.pad_id)
        })
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        if !self.is_single {
            return Ok(self.sample_len());
        }
        watched(self.flat.indexed(), index, || {
            let mut tokens = 0;
            self.for_each_run(index, |_, count| {
                tokens += count as usize;
                Ok(())
            })?;
            Ok(tokens)
        })
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        watched(self.flat.indexed(), index, || {
            layout.clear();
            let mut length = 0;
            self.for_each_run(index, |begin, count| {
                self.flat.pieces(index, begin, count, |piece: Piece| add_piece(layout, &mut length, piece))
            })?;
            mark_padding(layout, length, self.sample_len());
            Ok(())
        })
    }

    fn read_ahead(&self, index: u64) {
        // What cannot be read is told when it is read.
        let _ = watched(self.flat.indexed(), index, || {
            self.for_each_run(index, |begin, count| {
                self.flat.fetch(begin, count.min(self.flat.len() - begin));
                Ok(())
            })
        });
    }
}

//! Train, valid and test shares of one dataset, as Megatron divides it.

use std::fmt;
use std::ops::Range;

use crate::error::BuildError;

/// One of the three splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SplitName {
    /// Training.
    Train,
    /// Validation during training.
    Valid,
    /// Test after training.
    Test,
}

impl SplitName {
    /// The three, in the order of a split string.
    pub const ALL: [Self; 3] = [Self::Train, Self::Valid, Self::Test];

    /// The split called `name`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|split| split.name() == name)
    }

    /// `train`, `valid` or `test`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Valid => "valid",
            Self::Test => "test",
        }
    }
}

impl fmt::Display for SplitName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The part of the dataset that each split takes: from and to, as shares of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitMatrix {
    rows: [Option<(f64, f64)>; 3],
}

impl SplitMatrix {
    /// Reads a split string such as `969,30,1`: every run of digits and dots is a share, whatever stands between;
    /// missing shares are 0. The shares are divided by their sum and added up in the order in which numpy and Python do
    /// it.
    ///
    /// # Errors
    /// [`BuildError::BadSplit`] if there is no share, more than three, one that is no number, or none above 0.
    pub fn parse(split: &str) -> Result<Self, BuildError> {
        let bad = |reason: String| BuildError::BadSplit { split: split.to_owned(), reason };
        let mut shares = [0.0f64; 3];
        let mut count = 0;
        for word in
            split.split(|letter: char| !(letter.is_ascii_digit() || letter == '.')).filter(|word| !word.is_empty())
        {
            let share = shares.get_mut(count).ok_or_else(|| bad("it has more than three numbers".to_owned()))?;
            *share = word.parse().map_err(|_| bad(format!("{word:?} is no number")))?;
            count += 1;
        }
        let total = shares[0] + shares[1] + shares[2];
        if count == 0 {
            return Err(bad("it has no number".to_owned()));
        }
        if !(total > 0.0 && total.is_finite()) {
            return Err(bad(format!("the numbers add up to {total}")));
        }
        let mut low = 0.0;
        let rows = shares.map(|share| {
            let high = low + share / total;
            let row = (high > low).then_some((low, high));
            low = high;
            row
        });
        Ok(Self { rows })
    }

    /// All of a dataset for `split`, nothing for the others.
    pub fn whole(split: SplitName) -> Self {
        Self { rows: SplitName::ALL.map(|name| (name == split).then_some((0.0, 1.0))) }
    }

    /// Shares of the three splits: from and to. `None` where the split is switched off.
    pub fn rows(&self) -> [Option<(f64, f64)>; 3] {
        self.rows
    }

    /// Sequences that `split` takes of `num_sequences`. `None` if it is switched off; an empty range if its share
    /// rounds to nothing.
    pub fn sequences(&self, split: SplitName, num_sequences: usize) -> Option<Range<usize>> {
        let (low, high) = self.rows[split as usize]?;
        let round = |share: f64| ((share * num_sequences as f64).round_ties_even() as usize).min(num_sequences);
        Some(round(low)..round(high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_added_as_python_adds_them() {
        let matrix = SplitMatrix::parse("900,50,50").unwrap();
        let expected = [Some((0.0, 0.9)), Some((0.9, 0.950_000_000_000_000_1)), Some((0.950_000_000_000_000_1, 1.0))];
        assert_eq!(matrix.rows(), expected);
        let ranges = SplitName::ALL.map(|split| matrix.sequences(split, 300));
        assert_eq!(ranges, [Some(0..270), Some(270..285), Some(285..300)]);
    }

    #[test]
    fn half_rounds_to_even() {
        let matrix = SplitMatrix::parse("1,1").unwrap();
        let ends = [1, 3, 5, 7].map(|count| matrix.sequences(SplitName::Train, count).unwrap().end);
        assert_eq!(ends, [0, 2, 2, 4]);
    }

    #[test]
    fn spelling_is_as_free_as_in_megatron() {
        let expected = SplitMatrix::parse("98,1,1").unwrap();
        for spelling in ["98, 1, 1", "98/1/1", "[98 1 1.]", "98.0;1;1"] {
            assert_eq!(SplitMatrix::parse(spelling).unwrap(), expected, "{spelling}");
        }
        assert_eq!(SplitMatrix::parse("100,0,0").unwrap().rows()[1..], [None, None]);
        assert_eq!(SplitMatrix::parse(".5").unwrap(), SplitMatrix::parse("100").unwrap());
    }

    #[test]
    fn splits_without_meaning_are_refused() {
        for split in ["", "a,b", "0,0,0", "1,2,3,4", "1.2.3", "..."] {
            let message = SplitMatrix::parse(split).unwrap_err().to_string();
            assert!(message.contains("969,30,1") && message.contains(&format!("{split:?}")), "{message}");
        }
        assert!(SplitMatrix::parse(&"9".repeat(400)).is_err());
    }
}

//! What is wrong with a pair: found by any number of threads, told in the same order always.

use std::fmt;
use std::path::{Path, PathBuf};

use super::VerifyReport;
use crate::error::IndexError;
use crate::prefix::{data_path, index_path};

/// Faults that are described; beyond, they are counted.
pub(super) const FAULTS_SHOWN: usize = 20;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The file.
    pub path: PathBuf,
    /// Byte in the file at which it shows itself; `None` if it concerns the file as a whole.
    pub place: Option<u64>,
    /// What was expected and what was found.
    pub problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.path.display())?;
        if let Some(place) = self.place {
            write!(formatter, ": byte {place}")?;
        }
        write!(formatter, ": {}", self.problem)
    }
}

/// Faults of one thread, or of all.
#[derive(Debug, Default)]
pub(super) struct Faults {
    found: Vec<Fault>,
    pub(super) num_more: u64,
}

impl Faults {
    pub(super) fn add(&mut self, path: &Path, place: Option<u64>, problem: String) {
        self.found.push(Fault { path: path.to_owned(), place, problem });
        self.shorten();
    }

    /// Drops the last ones by place, so that what remains does not depend on the order in which they were found.
    fn shorten(&mut self) {
        if self.found.len() > 2 * FAULTS_SHOWN {
            self.found.sort();
            self.num_more += (self.found.len() - FAULTS_SHOWN) as u64;
            self.found.truncate(FAULTS_SHOWN);
        }
    }

    pub(super) fn extend(&mut self, more: Self) {
        self.found.extend(more.found);
        self.num_more += more.num_more;
        self.shorten();
    }

    /// The error that stopped the opening. Its words begin with the path.
    pub(super) fn add_open_error(&mut self, prefix: &Path, error: &IndexError) {
        let words = error.to_string();
        for path in [index_path(prefix), data_path(prefix)] {
            if let Some(problem) = words.strip_prefix(&format!("{}: ", path.display())) {
                return self.add(&path, None, problem.to_owned());
            }
        }
        self.add(&index_path(prefix), None, words);
    }

    pub(super) fn finish(mut self, report: VerifyReport) -> VerifyReport {
        self.found.sort();
        let num_faults = self.found.len() as u64 + self.num_more;
        self.found.truncate(FAULTS_SHOWN);
        VerifyReport { faults: self.found, num_faults, ..report }
    }
}

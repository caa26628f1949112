//! Which pair a prefix names.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::error::IndexError;

/// What preprocessing appends to its output prefix for the key `text`.
const TEXT_SUFFIX: &str = "_text_document";
/// Names listed in an error message.
const NAMES_SHOWN: usize = 4;

/// `prefix` + `.idx`.
pub(crate) fn index_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".idx")
}

/// `prefix` + `.bin`.
pub(crate) fn data_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".bin")
}

/// The prefix of the pair that `path` names: itself, or with `_text_document` appended. The name of either file of a
/// pair is taken too.
///
/// # Errors
/// [`IndexError::Missing`] if neither exists, or if only one file of the pair does. It names what lies beside it.
pub fn resolve_prefix(path: impl AsRef<Path>) -> Result<PathBuf, IndexError> {
    let path = path.as_ref();
    let without_extension = match path.extension().and_then(OsStr::to_str) {
        Some("idx" | "bin") if path.is_file() => path.with_extension(""),
        _ => path.to_path_buf(),
    };
    let candidates = [without_extension.clone(), with_suffix(&without_extension, TEXT_SUFFIX)];
    for candidate in &candidates {
        match (index_path(candidate).is_file(), data_path(candidate).is_file()) {
            (true, true) => return Ok(candidate.clone()),
            (false, false) => {}
            (true, false) => return Err(half_a_pair(path, &index_path(candidate), &data_path(candidate))),
            (false, true) => return Err(half_a_pair(path, &data_path(candidate), &index_path(candidate))),
        }
    }
    let [first, second] = candidates.map(|candidate| index_path(&candidate).display().to_string());
    Err(IndexError::Missing {
        prefix: path.to_path_buf(),
        missing: format!("neither {first} nor {second} exists."),
        found: if path.is_file() { from_text(path) } else { neighbours(&without_extension) },
    })
}

/// A sentence for a file that is there and is no pair: most likely the corpus itself.
fn from_text(path: &Path) -> String {
    format!(
        "{0} itself is a file of another kind: if it is a corpus, `megaflow-preprocess {0}` makes the pair.",
        path.display()
    )
}

fn half_a_pair(prefix: &Path, present: &Path, absent: &Path) -> IndexError {
    IndexError::Missing {
        prefix: prefix.to_path_buf(),
        missing: format!("{} is there, but {} is not.", present.display(), absent.display()),
        found: "A dataset needs both: copy or write the pair again.".to_owned(),
    }
}

/// `prefix` + `suffix`.
pub(crate) fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = prefix.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// A sentence about the pairs in the folder of `prefix`, so that a slip of the hand shows itself.
fn neighbours(prefix: &Path) -> String {
    let folder = match prefix.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return format!("The folder {} does not exist or cannot be read.", folder.display());
    };
    let mut names: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension() == Some(OsStr::new("idx")))
        .map(|path| path.with_extension(""))
        .collect();
    names.sort();
    if names.is_empty() {
        return format!("The folder {} holds no .idx file; was the corpus preprocessed?", folder.display());
    }
    let shown: Vec<String> = names.iter().take(NAMES_SHOWN).map(|name| name.display().to_string()).collect();
    let more =
        if names.len() > NAMES_SHOWN { format!(" and {} more", names.len() - NAMES_SHOWN) } else { String::new() };
    format!("The prefixes in that folder are: {}{more}.", shown.join(", "))
}

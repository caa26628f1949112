//! From what a user names to the files that are read.

use std::path::{Path, PathBuf};

use crate::SourceError;

/// Endings of the files that are taken from a folder, without the ending of a compression.
const ENDINGS: [&str; 8] = ["jsonl", "ndjson", "json", "parquet", "pq", "arrow", "arrows", "feather"];
const TEXT_ENDINGS: [&str; 2] = ["txt", "text"];
const PACKED: [&str; 6] = ["gz", "gzip", "zst", "zstd", "bz2", "xz"];

/// The files that `names` lead to, in reading order; `-` stands for standard input.
///
/// A name is a file, a folder (all files below it with an ending of a known format, but for results of earlier jobs; `.txt` if
/// `takes_text`), a pattern (`part-*.jsonl`, by
/// path), or `@list` (a file of names, one a line). Names keep their order; what one name leads to is sorted by the bytes of
/// its path. A file that several names lead to comes as often.
///
/// # Errors
/// [`SourceError::NothingFound`] for a folder, pattern or list that leads nowhere; a plain name is checked when it is read.
pub fn discover(names: &[PathBuf], takes_text: bool) -> Result<Vec<PathBuf>, SourceError> {
    let mut found = Vec::new();
    for name in names {
        add(name, takes_text, &mut found)?;
    }
    Ok(found)
}

fn add(path: &Path, takes_text: bool, found: &mut Vec<PathBuf>) -> Result<(), SourceError> {
    let name = path.to_string_lossy();
    let name = name.as_ref();
    if let Some(list) = name.strip_prefix('@').filter(|_| !path.exists()) {
        let io = |source| SourceError::Io { path: PathBuf::from(list), offset: 0, source };
        let names = std::fs::read_to_string(list).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => SourceError::Missing { path: PathBuf::from(list) },
            _ => io(error),
        })?;
        let names: Vec<&str> = names.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if names.is_empty() {
            return Err(nothing(name, "the list is empty"));
        }
        return names.iter().try_for_each(|name| add(Path::new(name), takes_text, found));
    }
    if path.is_dir() {
        let mut files = Vec::new();
        walk(path, takes_text, &mut files)?;
        if files.is_empty() {
            let endings: &[&str] = if takes_text { &TEXT_ENDINGS } else { &ENDINGS };
            let endings = endings.iter().map(|ending| format!(".{ending}")).collect::<Vec<_>>().join(" ");
            return Err(nothing(
                name,
                &format!("looked for {endings}, compressed or not; name other files themselves"),
            ));
        }
        files.sort();
        found.append(&mut files);
        return Ok(());
    }
    if !path.exists() && name.contains(['*', '?', '[']) {
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::default() };
        let pattern =
            glob::glob_with(name, options).map_err(|error| nothing(name, &format!("the pattern is wrong: {error}")))?;
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in pattern {
            let file = entry.map_err(|error| SourceError::Io {
                path: error.path().to_owned(),
                offset: 0,
                source: error.into(),
            })?;
            if !file.is_dir() {
                files.push(file);
            }
        }
        if files.is_empty() {
            return Err(nothing(name, "no file matches the pattern"));
        }
        files.sort();
        found.append(&mut files);
        return Ok(());
    }
    found.push(path.to_owned());
    Ok(())
}

fn nothing(what: &str, detail: &str) -> SourceError {
    SourceError::NothingFound { what: what.to_owned(), detail: detail.to_owned() }
}

/// Files below a folder, hidden ones left out; links are followed to files but not to folders.
fn walk(folder: &Path, takes_text: bool, files: &mut Vec<PathBuf>) -> Result<(), SourceError> {
    let io = |source| SourceError::Io { path: folder.to_owned(), offset: 0, source };
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let path = entry.path();
        if entry.file_type().map_err(io)?.is_dir() {
            walk(&path, takes_text, files)?;
        } else if path.is_file() && has_known_ending(&path, takes_text) {
            files.push(path);
        }
    }
    Ok(())
}

fn has_known_ending(path: &Path, takes_text: bool) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let mut parts: Vec<&str> = name.split('.').skip(1).collect();
    if parts.last().is_some_and(|last| PACKED.contains(last)) {
        parts.pop();
    }
    // What an earlier job wrote beside its input is no input.
    let is_result =
        name.ends_with(".rejects.jsonl") || (name.ends_with(".json") && path.with_extension("bin").exists());
    let wanted: &[&str] = if takes_text { &TEXT_ENDINGS } else { &ENDINGS };
    !is_result && parts.last().is_some_and(|last| wanted.contains(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_patterns_and_lists_lead_to_sorted_files_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir(root.join("sub")).unwrap();
        for name in [
            "b.jsonl",
            "a.jsonl.gz",
            "sub/c.parquet",
            "notes.md",
            ".hidden.jsonl",
            "d.txt",
            "b.rejects.jsonl",
            "b_text_document.json",
            "b_text_document.bin",
        ] {
            std::fs::write(root.join(name), "x").unwrap();
        }
        let text = |name: &str| root.join(name);
        let paths = |names: &[&str]| names.iter().map(|name| root.join(name)).collect::<Vec<_>>();
        let here = root.to_owned();
        assert_eq!(
            discover(std::slice::from_ref(&here), false).unwrap(),
            paths(&["a.jsonl.gz", "b.jsonl", "sub/c.parquet"])
        );
        assert_eq!(discover(&[here], true).unwrap(), paths(&["d.txt"]));
        assert_eq!(
            discover(&[text("?.jsonl*"), text("b.jsonl")], false).unwrap(),
            paths(&["a.jsonl.gz", "b.jsonl", "b.jsonl"])
        );
        std::fs::write(root.join("list"), format!("{}\n\n{}\n", text("d.txt").display(), text("b.jsonl").display()))
            .unwrap();
        assert_eq!(
            discover(&[PathBuf::from(format!("@{}", text("list").display()))], false).unwrap(),
            paths(&["d.txt", "b.jsonl"])
        );
        assert_eq!(discover(&[PathBuf::from("-")], false).unwrap(), [PathBuf::from("-")]);
    }

    #[test]
    fn what_leads_nowhere_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let message = |name: String| discover(&[PathBuf::from(name)], false).unwrap_err().to_string();
        let root = folder.path().to_str().unwrap();
        assert!(message(root.to_owned()).contains("no input files; looked for .jsonl"));
        assert!(message(format!("{root}/*.jsonl")).contains("no file matches the pattern"));
        assert!(message(format!("@{root}/gone")).contains("no such input file"));
    }
}

//! Finding out what tokenizer a path holds. Content decides, not the name.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bpe::{Ranks, TiktokenConfig, read_ranks, read_tekken};
use crate::ends::{Declared, of_tekken};
use crate::sentencepiece::Model;
use crate::{TokenizeError, Tokenizer};

/// A loaded tokenizer and the files that it was read from.
pub struct TokenizerFiles {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The files, in the order in which they were read.
    pub files: Vec<PathBuf>,
}

impl TokenizerFiles {
    /// Loads a `tokenizer.json`, a SentencePiece `.model`, tiktoken ranks with their configuration beside them, a
    /// `tekken.json`, or a folder that holds one: the first there is of `tokenizer.json`, `vocab.json` and `merges.txt`,
    /// `tokenizer.model`, `tekken.json` and the one file of tiktoken ranks.
    ///
    /// # Errors
    /// [`TokenizeError`] naming the file and what was found in it.
    pub fn from_path(path: &Path) -> Result<Self, TokenizeError> {
        if path.is_dir() {
            return Self::from_folder(path);
        }
        let bytes = read(path)?;
        match content_of(&bytes) {
            Content::TokenizerJson => {
                let declared = Declared::beside(path)?;
                let tokenizer = Tokenizer::of_tokenizer_json(&bytes, declared).map_err(|e| at(path, &e))?;
                Ok(Self { tokenizer, files: vec![path.to_owned()] })
            }
            Content::Vocabulary => match sibling(path, &["merges.txt", "vocab.bpe"]) {
                Some(merges) => Self::from_vocab_and_merges(path, &merges),
                None => Err(not_a_tokenizer(path, "is a vocabulary; name its merges with --merge-file")),
            },
            Content::SentencePiece => {
                let declared = Declared::beside(path)?;
                let tokenizer = Tokenizer::of_sentencepiece(&bytes, declared).map_err(|e| at(path, &e))?;
                Ok(Self { tokenizer, files: vec![path.to_owned()] })
            }
            Content::Ranks(ranks) => Self::from_ranks(path, &ranks),
            Content::Tekken(ranks, config) => {
                let (bos, eos) = of_tekken(&config.special_tokens);
                let declared = Declared { file: Some(path.to_owned()), bos, eos };
                let tokenizer = Tokenizer::from_ranks(&ranks, &config, declared).map_err(|e| at(path, &e))?;
                Ok(Self { tokenizer, files: vec![path.to_owned()] })
            }
            Content::Other => Err(not_a_tokenizer(
                path,
                "expected a tokenizer.json (a JSON object with \"model\"), a vocabulary (a JSON object of ids), a SentencePiece \
                 model, tiktoken ranks or a tekken.json",
            )),
        }
    }

    /// Loads GPT-2's two files, a JSON vocabulary and a list of merges.
    ///
    /// # Errors
    /// [`TokenizeError`] naming the file and what was found in it.
    pub fn from_vocab_and_merges(vocab: &Path, merges: &Path) -> Result<Self, TokenizeError> {
        let vocab_bytes = read(vocab)?;
        let merges_text = String::from_utf8(read(merges)?)
            .map_err(|error| not_a_tokenizer(merges, &format!("expected a list of merges in UTF-8: {error}")))?;
        let declared = Declared::beside(vocab)?;
        let tokenizer =
            Tokenizer::of_vocab_and_merges(&vocab_bytes, &merges_text, declared).map_err(|error| at(vocab, &error))?;
        Ok(Self { tokenizer, files: vec![vocab.to_owned(), merges.to_owned()] })
    }

    /// tiktoken's ranks, with a `tiktoken_config.json` beside them.
    fn from_ranks(path: &Path, ranks: &Ranks) -> Result<Self, TokenizeError> {
        let Some(config_path) = sibling(path, &["tiktoken_config.json"]) else {
            return Err(not_a_tokenizer(
                path,
                "holds tiktoken ranks; put a tiktoken_config.json with \"pat_str\" and \"special_tokens\" beside it",
            ));
        };
        let config: TiktokenConfig = serde_json::from_slice(&read(&config_path)?).map_err(|error| {
            not_a_tokenizer(&config_path, &format!("expected \"pat_str\" and \"special_tokens\": {error}"))
        })?;
        let declared = Declared::beside(path)?;
        let tokenizer = Tokenizer::from_ranks(ranks, &config, declared).map_err(|e| at(path, &e))?;
        Ok(Self { tokenizer, files: vec![path.to_owned(), config_path] })
    }

    fn from_folder(folder: &Path) -> Result<Self, TokenizeError> {
        let file = folder.join("tokenizer.json");
        if file.is_file() {
            return Self::from_path(&file);
        }
        let vocab = sibling(&file, &["vocab.json", "encoder.json"]);
        let merges = sibling(&file, &["merges.txt", "vocab.bpe"]);
        match (vocab, merges) {
            (Some(vocab), Some(merges)) => Self::from_vocab_and_merges(&vocab, &merges),
            _ => match sibling(&file, &["tokenizer.model", "tekken.json"])
                .map_or_else(|| ranks_in(folder), |found| Ok(Some(found)))?
            {
                Some(found) => Self::from_path(&found),
                None => Err(not_a_tokenizer(
                    folder,
                    "the folder holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt, tokenizer.model, \
                     tekken.json or a file of tiktoken ranks (*.tiktoken)",
                )),
            },
        }
    }
}

enum Content {
    TokenizerJson,
    Vocabulary,
    SentencePiece,
    Ranks(Ranks),
    Tekken(Ranks, TiktokenConfig),
    Other,
}

fn content_of(bytes: &[u8]) -> Content {
    #[derive(serde::Deserialize)]
    struct Probe {
        model: Option<serde::de::IgnoredAny>,
    }
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        if Model::is_likely(bytes) {
            return Content::SentencePiece;
        }
        if let Some(ranks) = read_ranks(bytes) {
            return Content::Ranks(ranks);
        }
        return Content::Other; // serde would take a list for the fields of a structure
    }
    match serde_json::from_slice::<Probe>(bytes) {
        Ok(Probe { model: Some(_) }) if !is_vocabulary(bytes) => Content::TokenizerJson,
        Ok(_) if is_vocabulary(bytes) => Content::Vocabulary,
        _ => read_tekken(bytes).map_or(Content::Other, |(ranks, config)| Content::Tekken(ranks, config)),
    }
}

fn is_vocabulary(bytes: &[u8]) -> bool {
    serde_json::from_slice::<std::collections::HashMap<String, u32>>(bytes).is_ok_and(|ids| !ids.is_empty())
}

/// The one file of tiktoken ranks in a folder, by its name.
fn ranks_in(folder: &Path) -> Result<Option<PathBuf>, TokenizeError> {
    let failed = |source| TokenizeError::Io { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|suffix| suffix == "tiktoken") || path.ends_with("tiktoken.model") {
            found.push(path);
        }
    }
    found.sort();
    match &found[..] {
        [first, second, ..] => {
            let detail = format!(
                "the folder holds several tokenizers, such as {} and {}; name one of them",
                first.display(),
                second.display()
            );
            Err(not_a_tokenizer(folder, &detail))
        }
        _ => Ok(found.pop()),
    }
}

fn sibling(path: &Path, names: &[&str]) -> Option<PathBuf> {
    names.iter().map(|name| path.with_file_name(name)).find(|candidate| candidate.is_file())
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizeError> {
    fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => TokenizeError::Missing { path: path.to_owned() },
        _ => TokenizeError::Io { path: path.to_owned(), source },
    })
}

fn not_a_tokenizer(path: &Path, detail: &str) -> TokenizeError {
    TokenizeError::NotATokenizer { path: path.to_owned(), detail: detail.to_owned() }
}

fn at(path: &Path, error: &TokenizeError) -> TokenizeError {
    not_a_tokenizer(path, &error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerSpec;

    const VOCAB: &str = r#"{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}"#;

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        tokenizer.encoder(crate::EncodeOptions::default()).unwrap().encode(text, &mut ids).unwrap();
        ids
    }

    #[test]
    fn a_vocabulary_named_txt_with_merges_is_byte_level_bpe() {
        let folder = tempfile::tempdir().unwrap();
        let (vocab, merges) = (folder.path().join("vocab.txt"), folder.path().join("merges.txt"));
        fs::write(&vocab, VOCAB).unwrap();
        fs::write(&merges, "#version: 0.2\na b\n").unwrap();
        let loaded = TokenizerFiles::from_path(&vocab).unwrap();
        assert_eq!(ids(&loaded.tokenizer, "abba"), [2, 1, 0]);
        assert_eq!(loaded.files, [vocab, merges]);
        assert_eq!(loaded.tokenizer.eod(None).unwrap(), Some(("<|endoftext|>".to_owned(), 3)));
    }

    #[test]
    fn a_folder_may_hold_ranks_under_any_name_but_not_two_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let ranks: String = (0..=255u8).map(|byte| format!("{} {byte}\n", base64_of(byte))).collect();
        fs::write(folder.path().join("own.tiktoken"), &ranks).unwrap();
        let pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
        let config = serde_json::json!({"pat_str": pattern, "special_tokens": {"<|endoftext|>": 256}});
        fs::write(folder.path().join("tiktoken_config.json"), config.to_string()).unwrap();
        let loaded = TokenizerFiles::from_path(folder.path()).unwrap();
        assert_eq!(ids(&loaded.tokenizer, "ab"), [97, 98]);
        fs::write(folder.path().join("other.tiktoken"), &ranks).unwrap();
        let error = TokenizerFiles::from_path(folder.path()).err().unwrap().to_string();
        assert!(error.contains("other.tiktoken and") && error.contains("own.tiktoken; name one of them"), "{error}");
    }

    /// One byte in base64.
    fn base64_of(byte: u8) -> String {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let letter = |six: u8| char::from(LETTERS[usize::from(six)]);
        format!("{}{}==", letter(byte >> 2), letter((byte & 3) << 4))
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let message = |path: &Path| TokenizerFiles::from_path(path).err().unwrap().to_string();
        assert!(message(&folder.path().join("gone.json")).contains("no such tokenizer file"));
        assert!(message(folder.path()).contains("neither tokenizer.json nor vocab.json"));
        let file = folder.path().join("lone.json");
        fs::write(&file, VOCAB).unwrap();
        assert!(message(&file).contains("name its merges with --merge-file"));
        fs::write(&file, "[1]").unwrap();
        assert!(message(&file).contains("lone.json: expected a tokenizer.json"));
    }

    #[test]
    fn the_end_of_document_that_a_config_declares_is_used() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vocab.json"), VOCAB).unwrap();
        fs::write(folder.path().join("merges.txt"), "a b\n").unwrap();
        let spec = TokenizerSpec::from_vocab_and_merges(VOCAB.as_bytes(), "a b\n").unwrap();
        fs::write(folder.path().join("tokenizer.json"), spec.to_json()).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": {"content": "b"}}"#).unwrap();
        let loaded = TokenizerFiles::from_path(folder.path()).unwrap();
        assert_eq!(loaded.tokenizer.eod(None).unwrap(), Some(("b".to_owned(), 1)));
    }
}

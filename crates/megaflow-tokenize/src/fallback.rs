//! The `tokenizers` crate as an engine: any `tokenizer.json`, the same ids as Hugging Face's own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::Tokenizer as HfTokenizer;

use crate::{EncodeOptions, Engine, EngineEncoder, EngineKind, SpecialTokensInText, TokenizeError};

/// A tokenizer of the `tokenizers` crate.
pub(crate) struct Fallback {
    tokenizer: HfTokenizer,
}

impl Fallback {
    /// Reads the text of a `tokenizer.json`.
    pub(crate) fn from_tokenizer_json(bytes: &[u8]) -> Result<Self, TokenizeError> {
        let mut tokenizer =
            HfTokenizer::from_bytes(bytes).map_err(|error| TokenizeError::invalid(error.to_string()))?;
        // A corpus is never cut or padded, whatever a file meant for inference says.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| TokenizeError::invalid(error.to_string()))?;
        Ok(Self { tokenizer })
    }
}

impl Engine for Fallback {
    fn kind(&self) -> EngineKind {
        EngineKind::HuggingFace
    }

    fn encoder(&self, options: EncodeOptions) -> Box<dyn EngineEncoder> {
        // A clone for each thread: the word cache behind the model is locked, and sharing it makes threads wait.
        let mut tokenizer = self.tokenizer.clone();
        tokenizer.set_encode_special_tokens(options.special_tokens_in_text != SpecialTokensInText::Encode);
        Box::new(FallbackEncoder { tokenizer, add_special_tokens: options.add_special_tokens })
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        self.tokenizer.decode(ids, false).map_err(|error| TokenizeError::invalid(error.to_string()))
    }
}

/// Runs the `tokenizers` crate on a text. Its regular expressions panic where they give up: that becomes an error.
pub(crate) fn guarded<T>(text: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TokenizeError> {
    let detail = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(text), _) => text.clone(),
            (None, Some(text)) => (*text).to_owned(),
            (None, None) => "the tokenizers crate failed".to_owned(),
        },
    };
    Err(TokenizeError::Encode { bytes: text.len(), detail })
}

struct FallbackEncoder {
    tokenizer: HfTokenizer,
    add_special_tokens: bool,
}

impl EngineEncoder for FallbackEncoder {
    fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        let encoding = guarded(text, || self.tokenizer.encode_fast(text, self.add_special_tokens))?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn encode_u16(&mut self, text: &str, out: &mut Vec<u16>) -> Result<(), TokenizeError> {
        let mut ids = Vec::new();
        self.encode(text, &mut ids)?;
        crate::tokenizer::check_u16(ids.iter().copied().max().unwrap_or(0))?;
        out.extend(ids.into_iter().map(|id| id as u16));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{EncodeOptions, EngineKind, Tokenizer};

    /// A rule that takes exponential time on the letters `a` before something else; the byte alphabet behind it, or not.
    fn tokenizer(behind: &str, model: &str) -> Tokenizer {
        let json = format!(
            r#"{{"added_tokens": [], "pre_tokenizer": {{"type": "Sequence", "pretokenizers": [{{"type": "Split", "pattern":
            {{"Regex": "(a+)+$"}}, "behavior": "Isolated", "invert": false}} {behind}]}}, "model": {model}}}"#
        );
        Tokenizer::from_tokenizer_json(json.as_bytes()).unwrap()
    }

    #[test]
    fn a_regular_expression_that_gives_up_is_an_error_and_the_next_text_is_encoded() {
        let byte_level =
            r#", {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}"#;
        let letters: Vec<String> = (0..=255u8).map(|byte| crate::bpe::token_of(&[byte])).collect();
        let vocab: std::collections::HashMap<_, u32> = letters.into_iter().zip(0..).collect();
        let bpe = serde_json::json!({"type": "BPE", "vocab": vocab, "merges": []}).to_string();
        let words = r#"{"type": "WordLevel", "vocab": {"a": 97, "[UNK]": 1}, "unk_token": "[UNK]"}"#;
        let two = [
            (EngineKind::ByteLevelBpeRegex, tokenizer(byte_level, &bpe)),
            (EngineKind::HuggingFace, tokenizer("", words)),
        ];
        for (kind, tokenizer) in two {
            assert_eq!(tokenizer.engine_kind(), kind);
            let (mut encoder, mut ids) = (tokenizer.encoder(EncodeOptions::default()).unwrap(), Vec::new());
            let error = encoder.encode(&format!("{}b", "a".repeat(60)), &mut ids).unwrap_err().to_string();
            assert!(error.starts_with("text of 61 bytes cannot be encoded: "), "{error}");
            ids.clear();
            encoder.encode("a", &mut ids).unwrap();
            assert_eq!(ids, [97]);
        }
    }
}

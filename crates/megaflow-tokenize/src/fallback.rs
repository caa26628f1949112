//! The `tokenizers` crate as an engine: any `tokenizer.json`, the same ids as Hugging Face's own.

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

struct FallbackEncoder {
    tokenizer: HfTokenizer,
    add_special_tokens: bool,
}

impl EngineEncoder for FallbackEncoder {
    fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, self.add_special_tokens)
            .map_err(|error| TokenizeError::Encode { bytes: text.len(), detail: error.to_string() })?;
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

//! What one thread does: a block of lines to documents.

use megaflow_core::TokenDtype;
use megaflow_indexed::EncodedDocuments;
use megaflow_source::{Block, Field, Outcome, ParseOptions, Reject, RejectReason, parse_block};
use megaflow_tokenize::{EncodeOptions, Encoder, Ends, TokenizeError, Tokenizer};

use crate::long_text::{Part, PartQueue};
use crate::{BuildError, EmptyDocuments, JobOptions, OnBadRecord};

/// Texts of more bytes than this are offered to other threads in parts.
const LONG_TEXT: usize = 1 << 20;

/// What became of a block.
#[derive(Debug, Default)]
pub(crate) struct EncodedBlock {
    /// Documents of each key.
    pub(crate) documents: Vec<EncodedDocuments>,
    /// Lines that are not blank.
    pub(crate) records: u64,
    /// Records that are no document.
    pub(crate) rejects: Vec<Reject>,
    /// Numbers of the lines or rows without a document.
    pub(crate) lines_without_document: Vec<u64>,
    /// Bytes of the documents' texts.
    pub(crate) text_bytes: u64,
    /// Places where text spelled a special token.
    pub(crate) special_hits: u64,
    /// Bytes of the file that were read for the block.
    pub(crate) input_bytes: u64,
}

/// One thread's state.
pub(crate) struct BlockEncoder<'a> {
    options: &'a JobOptions,
    parse: &'a ParseOptions,
    append_eod: Option<u32>,
    empty_documents: EmptyDocuments,
    stop_at_reject: bool,
    dtype: TokenDtype,
    tokenizer: Tokenizer,
    encoder: Encoder,
    scratch: Vec<Sequences>,
    /// Where long texts are shared, until there are no more blocks.
    parts: Option<PartQueue>,
    /// Places in the block where text spelled a special token.
    special_hits: u64,
}

/// Ids of the sequences of one document of one key.
#[derive(Debug, Default)]
struct Sequences {
    ids: Vec<u32>,
    ends: Vec<usize>,
}

impl Sequences {
    /// Puts an id, if there is one, behind the last sequence, which is made if there is none.
    fn extend_last(&mut self, id: Option<u32>) {
        if let Some(id) = id {
            self.ids.push(id);
            self.ends.pop();
            self.ends.push(self.ids.len());
        }
    }
}

impl<'a> BlockEncoder<'a> {
    pub(crate) fn new(
        options: &'a JobOptions,
        parse: &'a ParseOptions,
        tokenizer: &Tokenizer,
        dtype: TokenDtype,
        parts: PartQueue,
    ) -> Result<Self, TokenizeError> {
        let encode: EncodeOptions = options.encode;
        Ok(Self {
            options,
            parse,
            append_eod: options.append_eod,
            empty_documents: options.empty_documents,
            stop_at_reject: options.on_bad_record == OnBadRecord::Error,
            dtype,
            tokenizer: tokenizer.clone(),
            encoder: tokenizer.encoder(encode)?,
            scratch: options.json_keys.iter().map(|_| Sequences::default()).collect(),
            parts: Some(parts),
            special_hits: 0,
        })
    }

    /// Encodes a part of a text of another thread.
    pub(crate) fn encode_part(&mut self, part: Part) {
        part.encode(&mut self.encoder);
    }

    /// There are no more blocks: this thread posts no more parts.
    pub(crate) fn end_blocks(&mut self) {
        self.parts = None;
    }

    /// Parses and tokenizes a block; `lines_before` lines of earlier inputs count for partitions. Under policy `Error` it ends at
    /// the first bad record: nothing behind it is written.
    ///
    /// # Errors
    /// [`BuildError::Sentences`].
    pub(crate) fn encode(&mut self, block: &Block, lines_before: u64) -> Result<EncodedBlock, BuildError> {
        let mut failed = None;
        let (parse, every) = (self.parse, self.options.every);
        self.special_hits = 0;
        let mut done = EncodedBlock { input_bytes: block.input_bytes, ..EncodedBlock::default() };
        done.documents.resize_with(self.options.json_keys.len(), EncodedDocuments::default);
        parse_block(block, parse, |place, raw, outcome| {
            let is_other = every.is_some_and(|(index, modulo)| (lines_before + place.number() - 1) % modulo != index);
            let reason = match outcome {
                _ if is_other => return true,
                Outcome::Blank => {
                    done.lines_without_document.push(place.number());
                    return true;
                }
                Outcome::Record(fields) => {
                    done.text_bytes += text_bytes(&fields);
                    match self.sentences_of(fields) {
                        Ok(fields) => self.encode_record(&fields, &mut done.documents).err(),
                        Err(detail) => {
                            failed = Some(BuildError::Sentences { detail });
                            return false;
                        }
                    }
                }
                Outcome::Bad(reason) => Some(reason),
            };
            done.records += 1;
            if let Some(reason) = reason {
                done.lines_without_document.push(place.number());
                done.rejects.push(Reject { place, reason, raw: raw.to_vec() });
            }
            done.rejects.is_empty() || !self.stop_at_reject
        });
        done.special_hits = self.special_hits;
        failed.map_or(Ok(done), Err)
    }

    /// Texts cut into sentences, if that is asked for. Lists are taken as they are: sentences already.
    fn sentences_of<'f>(&self, fields: Vec<Field<'f>>) -> Result<Vec<Field<'f>>, String> {
        let Some(split) = &self.options.sentences else { return Ok(fields) };
        let cut = |field| match field {
            Field::Text(text) => Ok(Field::Texts(split.split(&text)?.into_iter().map(Into::into).collect())),
            texts @ Field::Texts(_) => Ok(texts),
        };
        fields.into_iter().map(cut).collect()
    }

    /// All keys are encoded before any is stored, so that a bad record leaves nothing behind.
    fn encode_record(&mut self, fields: &[Field<'_>], documents: &mut [EncodedDocuments]) -> Result<(), RejectReason> {
        let Ends { bos, eos } = self.encoder.ends();
        for (field, sequences) in fields.iter().zip(&mut self.scratch) {
            sequences.ids.clear();
            sequences.ends.clear();
            sequences.ids.extend(bos); // of the first sequence that is not empty
            for text in field.texts() {
                let before = sequences.ids.len();
                let hits = match self.parts.as_ref().filter(|parts| parts.is_shared() && text.len() > LONG_TEXT) {
                    Some(queue) => {
                        let parts = self.tokenizer.parts(text, self.options.encode);
                        queue.encode(parts, &mut self.encoder, &mut sequences.ids)
                    }
                    None => {
                        let hits = self.encoder.special_hits();
                        let encoded = self.encoder.encode_part(text, &mut sequences.ids);
                        encoded.map(|()| self.encoder.special_hits() - hits)
                    }
                };
                self.special_hits += hits.map_err(not_tokenized)?;
                if sequences.ids.len() > before {
                    sequences.ends.push(sequences.ids.len());
                }
            }
            if sequences.ends.is_empty() {
                sequences.ids.clear(); // an empty document has neither
            } else {
                sequences.extend_last(eos);
            }
            let fill_empty = sequences.ends.is_empty() && self.empty_documents == EmptyDocuments::Eod;
            sequences.extend_last(self.append_eod.filter(|_| fill_empty || !sequences.ends.is_empty()));
        }
        let too_long = |sequences: &Sequences| sequences.ids.len() > i32::MAX as usize;
        if let Some(sequences) = self.scratch.iter().find(|sequences| too_long(sequences)) {
            let tokens = sequences.ids.len();
            return Err(not_tokenized(megaflow_indexed::WriteError::SequenceTooLong { tokens }));
        }
        for (sequences, documents) in self.scratch.iter().zip(documents) {
            let mut start = 0;
            for &end in &sequences.ends {
                documents.push_sequence(&sequences.ids[start..end], self.dtype).map_err(not_tokenized)?;
                start = end;
            }
            documents.end_document(sequences.ends.len() as u32);
        }
        Ok(())
    }
}

fn text_bytes(fields: &[Field<'_>]) -> u64 {
    fields.iter().flat_map(Field::texts).map(|text| text.len() as u64).sum()
}

fn not_tokenized(error: impl std::fmt::Display) -> RejectReason {
    RejectReason::NotTokenized { detail: error.to_string() }
}

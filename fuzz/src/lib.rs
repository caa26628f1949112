//! What the targets share: bytes as an input, and everything that can be read of it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use megaflow_source::{
    Field, Format, Outcome, ParseOptions, RandomAccess, ReadOptions, Resume, Source, SourceError, SourceReader, parse_block,
};

struct Bytes(Vec<u8>);

impl RandomAccess for Bytes {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.0[usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len())..];
        let got = rest.len().min(buffer.len());
        buffer[..got].copy_from_slice(&rest[..got]);
        Ok(got)
    }
}

/// Bytes as an input that can be read at any place.
pub fn source(bytes: &[u8]) -> Source {
    Source::remote(PathBuf::from("input"), Arc::new(Bytes(bytes.to_vec())))
}

/// One record a line, and the place behind each block; or the error that ended the reading.
pub type Records = Result<(Vec<String>, Vec<(usize, Resume)>), SourceError>;

/// Reads all of an input.
pub fn read(source: &Source, format: Option<Format>, keys: &[&str], block_bytes: usize, resume: Option<&Resume>) -> Records {
    let keys: Arc<[String]> = keys.iter().map(|&key| key.to_owned()).collect();
    let options = ReadOptions { keys: Arc::clone(&keys), format, block_bytes };
    collect(SourceReader::open(source, &options, resume)?, &ParseOptions::new(&keys, false))
}

/// Reads all that a reader gives.
pub fn collect(mut reader: SourceReader, parse: &ParseOptions) -> Records {
    let (mut records, mut places) = (Vec::new(), Vec::new());
    while let Some(block) = reader.next_block()? {
        parse_block(&block, parse, |place, _, outcome| {
            match outcome {
                Outcome::Record(fields) => records.push(fields.iter().map(text_of).collect()),
                Outcome::Blank => {}
                Outcome::Bad(reason) => records.push(format!("{place}: {reason}")),
            }
            true
        });
        places.push((records.len(), Resume { position: reader.position(), content: reader.content() }));
    }
    Ok((records, places))
}

fn text_of(field: &Field<'_>) -> String {
    field.texts().join("|")
}

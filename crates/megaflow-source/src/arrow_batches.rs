//! Arrow IPC to record batches of the columns that hold text.
//!
//! Strings are read as bytes: `arrow-ipc` checks a column at once, and one value that is not UTF-8 would make the whole input
//! unreadable. As bytes, each value is checked as a record of its own.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::reader::{read_dictionary, read_record_batch};
use arrow_ipc::{MessageHeader, root_as_message};
use arrow_schema::{ArrowError, DataType, FieldRef, Schema, SchemaRef};

use crate::arrow_messages::{Message, Messages, check_batch, check_version, wrong};

/// Batches of a file or stream.
pub(crate) struct ArrowBatches<M> {
    messages: M,
    schema: SchemaRef,
    /// Places of the top-level columns that are read, in order.
    columns: Vec<usize>,
    dictionaries: HashMap<i64, ArrayRef>,
}

impl<M: Messages> ArrowBatches<M> {
    /// `schema` describes the messages, `columns` are the places of those wanted.
    pub(crate) fn new(messages: M, schema: &Schema, mut columns: Vec<usize>) -> Self {
        columns.sort_unstable();
        columns.dedup();
        let fields = schema.fields().iter().map(strings_as_bytes).collect::<Vec<_>>();
        Self { messages, schema: Arc::new(Schema::new(fields)), columns, dictionaries: HashMap::new() }
    }

    /// The batch that a message holds, if it is one; a dictionary is kept for the batches behind it.
    fn take(&mut self, message: Message) -> Result<Option<RecordBatch>, ArrowError> {
        let header = root_as_message(&message.header).map_err(|error| wrong(error.to_string()))?;
        let version = header.version();
        check_version(version)?;
        match header.header_type() {
            MessageHeader::RecordBatch => {
                let batch =
                    header.header_as_record_batch().ok_or_else(|| wrong("a batch without a header".to_owned()))?;
                check_batch(batch, &message.body)?;
                let body = message.body.into();
                let (schema, columns) = (Arc::clone(&self.schema), Some(self.columns.as_slice()));
                read_record_batch(&body, batch, schema, &self.dictionaries, columns, &version).map(Some)
            }
            MessageHeader::DictionaryBatch => {
                let batch = header.header_as_dictionary_batch();
                let batch = batch.ok_or_else(|| wrong("a dictionary without a header".to_owned()))?;
                let values = batch.data().ok_or_else(|| wrong("a dictionary without values".to_owned()))?;
                check_batch(values, &message.body)?;
                read_dictionary(&message.body.into(), batch, &self.schema, &mut self.dictionaries, &version)?;
                Ok(None)
            }
            kind => Err(wrong(format!("a message of the kind {kind:?} among the batches"))),
        }
    }
}

impl<M: Messages> Iterator for ArrowBatches<M> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let message = match self.messages.next_message() {
                Ok(message) => message?,
                Err(error) => return Some(Err(error)),
            };
            if let Some(batch) = self.take(message).transpose() {
                return Some(batch);
            }
        }
    }
}

/// The same field, but that strings in it are bytes; they lie in memory in the same way.
fn strings_as_bytes(field: &FieldRef) -> FieldRef {
    let kind = bytes_of(field.data_type());
    Arc::new(field.as_ref().clone().with_data_type(kind))
}

fn bytes_of(kind: &DataType) -> DataType {
    match kind {
        DataType::Utf8 => DataType::Binary,
        DataType::LargeUtf8 => DataType::LargeBinary,
        DataType::Utf8View => DataType::BinaryView,
        DataType::List(item) => DataType::List(strings_as_bytes(item)),
        DataType::LargeList(item) => DataType::LargeList(strings_as_bytes(item)),
        DataType::FixedSizeList(item, size) => DataType::FixedSizeList(strings_as_bytes(item), *size),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(strings_as_bytes).collect()),
        DataType::Dictionary(key, value) => DataType::Dictionary(key.clone(), Box::new(bytes_of(value))),
        kind => kind.clone(),
    }
}

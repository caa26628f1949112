//! Columns of text, whatever type the table gives them.

use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowDictionaryKeyType, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch, StructArray};
use arrow_schema::DataType;

use crate::SourceError;

/// One column of a table that holds text, or lists of texts.
#[derive(Debug, Clone)]
pub struct TextColumn {
    values: ArrayRef,
    /// Whether the row is null because a structure around it is.
    nulls_above: Vec<ArrayRef>,
}

/// What a row of a column holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cell<'a> {
    Bytes(&'a [u8]),
    List(Vec<&'a [u8]>),
    Null,
    /// A list in which something is null.
    NullInList,
}

impl TextColumn {
    /// The column that `key` names: a column of that very name, or else a path through structures (`data.text`).
    pub(crate) fn find(batch: &RecordBatch, key: &str, path: &Path) -> Result<Self, SourceError> {
        let missing = || SourceError::MissingColumn {
            path: path.to_owned(),
            key: key.to_owned(),
            columns: batch
                .schema()
                .fields()
                .iter()
                .map(|field| format!("{:?}", field.name()))
                .collect::<Vec<_>>()
                .join(", "),
        };
        if let Some(values) = batch.column_by_name(key) {
            return Self::new(Arc::clone(values), Vec::new(), key, path);
        }
        let mut parts = key.split('.');
        let mut values = parts.next().and_then(|part| batch.column_by_name(part)).ok_or_else(missing)?;
        let mut nulls_above = Vec::new();
        for part in parts {
            let parent: &StructArray = values.as_struct_opt().ok_or_else(missing)?;
            nulls_above.push(Arc::clone(values));
            values = parent.column_by_name(part).ok_or_else(missing)?;
        }
        Self::new(Arc::clone(values), nulls_above, key, path)
    }

    fn new(values: ArrayRef, nulls_above: Vec<ArrayRef>, key: &str, path: &Path) -> Result<Self, SourceError> {
        if is_text_or_list(values.data_type()) {
            return Ok(Self { values, nulls_above });
        }
        Err(SourceError::ColumnKind {
            path: path.to_owned(),
            key: key.to_owned(),
            found: values.data_type().to_string(),
        })
    }

    /// What row `row` holds. Panics behind the last row.
    pub(crate) fn cell(&self, row: usize) -> Cell<'_> {
        if self.nulls_above.iter().any(|parent| parent.is_null(row)) || self.values.is_null(row) {
            return Cell::Null;
        }
        let (items, begin, end) = match self.values.data_type() {
            DataType::List(_) => {
                let list = self.values.as_list::<i32>();
                (list.values(), list.value_offsets()[row] as usize, list.value_offsets()[row + 1] as usize)
            }
            DataType::LargeList(_) => {
                let list = self.values.as_list::<i64>();
                (list.values(), list.value_offsets()[row] as usize, list.value_offsets()[row + 1] as usize)
            }
            DataType::FixedSizeList(..) => {
                let list = self.values.as_fixed_size_list();
                let size = list.value_length() as usize;
                let begin = list.value_offset(row) as usize;
                (list.values(), begin, begin + size)
            }
            _ => return bytes_at(self.values.as_ref(), row).map_or(Cell::Null, Cell::Bytes),
        };
        let texts: Option<Vec<&[u8]>> = (begin..end).map(|item| bytes_at(items.as_ref(), item)).collect();
        texts.map_or(Cell::NullInList, Cell::List)
    }
}

fn is_text_or_list(kind: &DataType) -> bool {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            is_text(item.data_type())
        }
        kind => is_text(kind),
    }
}

/// Binary columns count as text: each value is checked to be UTF-8 when it is read.
fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8
        | DataType::LargeUtf8
        | DataType::Utf8View
        | DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::Null => true,
        DataType::Dictionary(_, value) => is_text(value),
        _ => false,
    }
}

/// Bytes of one value, `None` for null.
fn bytes_at(values: &dyn Array, row: usize) -> Option<&[u8]> {
    if values.is_null(row) {
        return None;
    }
    match values.data_type() {
        DataType::Utf8 => Some(values.as_string::<i32>().value(row).as_bytes()),
        DataType::LargeUtf8 => Some(values.as_string::<i64>().value(row).as_bytes()),
        DataType::Utf8View => Some(values.as_string_view().value(row).as_bytes()),
        DataType::Binary => Some(values.as_binary::<i32>().value(row)),
        DataType::LargeBinary => Some(values.as_binary::<i64>().value(row)),
        DataType::BinaryView => Some(values.as_binary_view().value(row)),
        DataType::Dictionary(key, _) => match key.as_ref() {
            DataType::Int8 => entry::<Int8Type>(values, row),
            DataType::Int16 => entry::<Int16Type>(values, row),
            DataType::Int32 => entry::<Int32Type>(values, row),
            DataType::Int64 => entry::<Int64Type>(values, row),
            DataType::UInt8 => entry::<UInt8Type>(values, row),
            DataType::UInt16 => entry::<UInt16Type>(values, row),
            DataType::UInt32 => entry::<UInt32Type>(values, row),
            DataType::UInt64 => entry::<UInt64Type>(values, row),
            _ => None,
        },
        _ => None,
    }
}

fn entry<K: ArrowDictionaryKeyType>(values: &dyn Array, row: usize) -> Option<&[u8]> {
    let dictionary = values.as_dictionary::<K>();
    bytes_at(dictionary.values().as_ref(), dictionary.key(row)?)
}

//! Parquet's strings read as bytes.
//!
//! The `parquet` crate checks strings a page at a time, and one value that is not UTF-8 would make the whole file unreadable. Read
//! as bytes, each value is checked as a record of its own. The bytes of a column lie in the file in the same way either way; what
//! differs is the type that the footer gives them, and that is what is changed here, in memory.

use std::sync::Arc;

use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::basic::{ConvertedType, LogicalType};
use parquet::errors::Result;
use parquet::file::metadata::{ColumnChunkMetaData, FileMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::schema::types::{ColumnDescPtr, SchemaDescPtr, SchemaDescriptor, Type, TypePtr};

/// How to read a file whose footer was read: strings as large binary, whatever Arrow type their writer had, so that no batch is too
/// large for its offsets.
pub(crate) fn strings_as_bytes(metadata: &ParquetMetaData) -> Result<ArrowReaderMetadata> {
    let file = metadata.file_metadata();
    let schema = Arc::new(SchemaDescriptor::new(without_strings(file.schema_descr().root_schema_ptr())?));
    let groups = metadata.row_groups().iter().map(|group| with_schema(group, &schema)).collect::<Result<Vec<_>>>()?;
    let created_by = file.created_by().map(str::to_owned);
    // The Arrow schema of the writer, a key of the file, is left out: it would ask for strings again.
    let file = FileMetaData::new(file.version(), file.num_rows(), created_by, None, schema, None);
    let metadata = Arc::new(ParquetMetaData::new(file, groups));
    let found = ArrowReaderMetadata::try_new(Arc::clone(&metadata), ArrowReaderOptions::new())?;
    let large = Schema::new(found.schema().fields().iter().map(large_bytes).collect::<Fields>());
    ArrowReaderMetadata::try_new(metadata, ArrowReaderOptions::new().with_schema(Arc::new(large)))
}

/// The same type, but that strings in it are bytes.
fn without_strings(schema: TypePtr) -> Result<TypePtr> {
    let info = schema.get_basic_info();
    let repetition = info.has_repetition().then(|| info.repetition());
    let id = info.has_id().then(|| info.id());
    match schema.as_ref() {
        Type::PrimitiveType { physical_type, .. } => {
            if info.converted_type() != ConvertedType::UTF8 && info.logical_type_ref() != Some(&LogicalType::String) {
                return Ok(schema);
            }
            let mut builder = Type::primitive_type_builder(info.name(), *physical_type).with_id(id);
            if let Some(repetition) = repetition {
                builder = builder.with_repetition(repetition);
            }
            Ok(Arc::new(builder.build()?))
        }
        Type::GroupType { fields, .. } => {
            let fields = fields.iter().map(|field| without_strings(Arc::clone(field))).collect::<Result<Vec<_>>>()?;
            let mut builder = Type::group_type_builder(info.name())
                .with_converted_type(info.converted_type())
                .with_logical_type(info.logical_type_ref().cloned())
                .with_fields(fields)
                .with_id(id);
            if let Some(repetition) = repetition {
                builder = builder.with_repetition(repetition);
            }
            Ok(Arc::new(builder.build()?))
        }
    }
}

fn with_schema(group: &RowGroupMetaData, schema: &SchemaDescPtr) -> Result<RowGroupMetaData> {
    let columns = group.columns().iter().enumerate();
    let columns = columns.map(|(leaf, column)| with_type(column, schema.column(leaf))).collect::<Result<Vec<_>>>()?;
    RowGroupMetaData::builder(Arc::clone(schema))
        .set_num_rows(group.num_rows())
        .set_total_byte_size(group.total_byte_size())
        .set_column_metadata(columns)
        .build()
}

/// What is needed to read the pages of a column, and no more.
fn with_type(column: &ColumnChunkMetaData, kind: ColumnDescPtr) -> Result<ColumnChunkMetaData> {
    ColumnChunkMetaData::builder(kind)
        .set_encodings_mask(*column.encodings_mask())
        .set_num_values(column.num_values())
        .set_compression(column.compression())
        .set_total_compressed_size(column.compressed_size())
        .set_total_uncompressed_size(column.uncompressed_size())
        .set_data_page_offset(column.data_page_offset())
        .set_dictionary_page_offset(column.dictionary_page_offset())
        .set_index_page_offset(column.index_page_offset())
        .build()
}

/// A field with 64-bit offsets for its bytes, at any depth.
fn large_bytes(field: &FieldRef) -> FieldRef {
    let kind = match field.data_type() {
        DataType::Binary => DataType::LargeBinary,
        DataType::List(item) => DataType::List(large_bytes(item)),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(large_bytes).collect()),
        _ => return Arc::clone(field),
    };
    Arc::new(Field::new(field.name(), kind, field.is_nullable()))
}

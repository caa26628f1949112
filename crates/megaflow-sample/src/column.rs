//! Arrays of an index: in memory, or in a mapped file of numpy's format.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use megaflow_indexed::FileMap;

const NPY_MAGIC: &[u8; 6] = b"\x93NUMPY";
/// numpy begins the data at a multiple of this.
const NPY_ALIGN: usize = 64;

/// A number that arrays of an index hold.
pub trait Item: Copy + PartialEq + Send + Sync + 'static {
    /// numpy's name of the type.
    const TYPESTR: &'static str;
    /// Bytes of one.
    const BYTES: usize;
    /// Reads one from the front of `bytes`.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Appends one to `bytes`.
    fn append_to(self, bytes: &mut Vec<u8>);
}

macro_rules! item {
    ($type:ty, $name:literal) => {
        impl Item for $type {
            const TYPESTR: &'static str = $name;
            const BYTES: usize = size_of::<$type>();

            #[inline(always)]
            fn from_bytes(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(&bytes[..size_of::<$type>()]);
                Self::from_le_bytes(array)
            }

            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    };
}
item!(i16, "<i2");
item!(i32, "<i4");
item!(u32, "<u4");
item!(i64, "<i8");

/// An array of an index.
#[derive(Debug, Clone)]
pub enum Column<T> {
    /// In memory.
    Owned(Vec<T>),
    /// In a file.
    Mapped(MappedColumn),
}

/// An array in a mapped file.
#[derive(Debug, Clone)]
pub struct MappedColumn {
    map: Arc<FileMap>,
    at: usize,
    len: usize,
}

impl<T: Item> Column<T> {
    /// Number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Owned(items) => items.len(),
            Self::Mapped(mapped) => mapped.len,
        }
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entry `index`, if it exists.
    #[inline]
    pub fn get(&self, index: usize) -> Option<T> {
        match self {
            Self::Owned(items) => items.get(index).copied(),
            Self::Mapped(mapped) if index < mapped.len => Some(T::from_bytes(&mapped.bytes::<T>()[index * T::BYTES..])),
            Self::Mapped(_) => None,
        }
    }

    /// All entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The entries, if they are in memory.
    pub fn as_slice(&self) -> Option<&[T]> {
        match self {
            Self::Owned(items) => Some(items),
            Self::Mapped(_) => None,
        }
    }

    /// The bytes of the entries, little-endian, if they are in a file.
    pub fn as_mapped_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Owned(_) => None,
            Self::Mapped(mapped) => Some(mapped.bytes::<T>()),
        }
    }

    /// Maps an array of `rows` rows of `width` entries (1: one-dimensional) from a file of numpy's format.
    pub(crate) fn open_npy(path: &Path, rows: usize, width: usize) -> Result<Self, String> {
        let map = FileMap::open(path).map_err(|error| error.to_string())?;
        let at = data_start(map.bytes(), &header_text::<T>(rows, width)).map_err(|found| {
            format!("{}: expected {}, found {found}", path.display(), header_text::<T>(rows, width))
        })?;
        let (expected, found) = (at + rows * width * T::BYTES, map.bytes().len());
        if expected != found {
            return Err(format!("{}: expected {expected} bytes, found {found}", path.display()));
        }
        Ok(Self::Mapped(MappedColumn { map: Arc::new(map), at, len: rows * width }))
    }

    /// Writes the array as numpy does.
    pub(crate) fn write_npy(&self, file: &File, width: usize) -> std::io::Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        let text = header_text::<T>(self.len() / width, width);
        let unpadded = NPY_MAGIC.len() + 4 + text.len() + 1;
        let padding = unpadded.next_multiple_of(NPY_ALIGN) - unpadded;
        writer.write_all(NPY_MAGIC)?;
        writer.write_all(&[1, 0])?;
        writer.write_all(&((text.len() + padding + 1) as u16).to_le_bytes())?;
        writer.write_all(text.as_bytes())?;
        writer.write_all(&vec![b' '; padding])?;
        writer.write_all(b"\n")?;
        let mut buffer = Vec::with_capacity(1 << 16);
        let mut next = 0;
        while next < self.len() {
            buffer.clear();
            let end = self.len().min(next + (1 << 13));
            (next..end).filter_map(|index| self.get(index)).for_each(|item| item.append_to(&mut buffer));
            writer.write_all(&buffer)?;
            next = end;
        }
        writer.flush()
    }
}

impl<T: Item> PartialEq for Column<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<T: Item> Eq for Column<T> {}

impl MappedColumn {
    #[inline]
    fn bytes<T: Item>(&self) -> &[u8] {
        &self.map.bytes()[self.at..self.at + self.len * T::BYTES]
    }
}

/// numpy's description of an array, a Python dictionary.
fn header_text<T: Item>(rows: usize, width: usize) -> String {
    let shape = if width == 1 { format!("({rows},)") } else { format!("({rows}, {width})") };
    format!("{{'descr': '{}', 'fortran_order': False, 'shape': {shape}, }}", T::TYPESTR)
}

/// Where the data begin, if the header says what is expected of it; else what it says.
fn data_start(bytes: &[u8], expected: &str) -> Result<usize, String> {
    let version = bytes.get(6).copied().unwrap_or(0);
    let (length, text_at) = match (bytes.starts_with(NPY_MAGIC), version) {
        (true, 1) => (bytes.get(8..10).map(|two| usize::from(u16::from_le_bytes([two[0], two[1]]))), 10),
        (true, 2 | 3) => {
            (bytes.get(8..12).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]) as usize), 12)
        }
        _ => return Err("no array of numpy".to_owned()),
    };
    let end = length.and_then(|length| length.checked_add(text_at));
    let text = end.and_then(|end| bytes.get(text_at..end)).ok_or("a cut header")?;
    let text = String::from_utf8_lossy(text);
    if text.trim_end() == expected { Ok(text_at + text.len()) } else { Err(text.trim_end().to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_array_is_read_back_and_a_cut_one_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("array.npy");
        let column = Column::Owned((0..20_000i32).map(|value| value * 7 - 5).collect());
        column.write_npy(&File::create(&path).unwrap(), 2).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 128 + 80_000);
        assert!(bytes[..128].ends_with(b"\n") && bytes[10..].starts_with(b"{'descr': '<i4'"));
        assert_eq!(Column::<i32>::open_npy(&path, 10_000, 2).unwrap(), column);
        assert!(Column::<u32>::open_npy(&path, 10_000, 2).unwrap_err().contains("expected {'descr': '<u4'"));
        assert!(Column::<i32>::open_npy(&path, 9_999, 2).is_err());
        for len in [0, 5, 11, 100, 127, 128, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..len]).unwrap();
            assert!(Column::<i32>::open_npy(&path, 10_000, 2).is_err(), "{len} bytes");
        }
    }
}

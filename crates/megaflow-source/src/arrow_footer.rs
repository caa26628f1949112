//! What an Arrow file's footer says about sizes, compared with the file before anything is allocated for it.

use std::io;

use arrow_ipc::root_as_footer;

use crate::access::{RandomAccess, read_full};

/// Length of the footer, and the magic that ends the file.
const END_BYTES: u64 = 10;

/// Checks that every batch that the footer names lies in the file.
///
/// # Errors
/// What is wrong, in words.
pub(crate) fn check_blocks(access: &dyn RandomAccess) -> Result<(), String> {
    let size = access.size_bytes();
    let read = |offset: u64, bytes: usize| -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; bytes];
        read_full(access, offset, &mut buffer)?;
        Ok(buffer)
    };
    let end = size.checked_sub(END_BYTES).ok_or_else(|| format!("a file of {size} bytes has no footer"))?;
    let length = read(end, 4).map_err(|error| error.to_string())?;
    let length = u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
    let begin =
        end.checked_sub(length).ok_or_else(|| format!("its footer of {length} bytes is longer than the file"))?;
    let bytes = read(begin, length as usize).map_err(|error| error.to_string())?;
    let footer = root_as_footer(&bytes).map_err(|error| format!("its footer cannot be read: {error}"))?;
    let blocks = footer.recordBatches().into_iter().flatten().chain(footer.dictionaries().into_iter().flatten());
    for block in blocks {
        let parts = [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()];
        let total = parts.iter().try_fold(0_u64, |sum, &part| sum.checked_add(u64::try_from(part).ok()?));
        if total.is_none_or(|total| total > size) {
            let [offset, metadata, body] = parts;
            return Err(format!(
                "its footer names a batch of {metadata} and {body} bytes at byte {offset}, which lies outside of the {size} \
                 bytes of the file"
            ));
        }
    }
    Ok(())
}

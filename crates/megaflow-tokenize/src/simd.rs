//! The unsafe corner: vector instructions that classify bytes, and prefetching. Each function has a portable twin.

use std::alloc::Layout;
use std::ptr::NonNull;

/// Classes of 64 bytes, one bit a byte.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Masks {
    /// Bytes of letters.
    pub(crate) letter: u64,
    /// Bytes of numbers.
    pub(crate) number: u64,
    /// Bytes of white space.
    pub(crate) space: u64,
    /// `\r` and `\n`.
    pub(crate) newline: u64,
    /// The blank, 0x20.
    pub(crate) blank: u64,
    /// `'`
    pub(crate) apostrophe: u64,
    /// `/`
    pub(crate) slash: u64,
    /// Bytes of capitals (`\p{Lu}` and `\p{Lt}`).
    pub(crate) upper: u64,
    /// Bytes of letters that are neither capital nor small; never ASCII.
    pub(crate) caseless: u64,
    /// Bytes that continue a character (0x80 to 0xBF).
    pub(crate) continuation: u64,
    /// Bytes of no ASCII character.
    pub(crate) high: u64,
    /// Bytes that belong to the text.
    pub(crate) valid: u64,
}

/// Classes of the ASCII characters of `text`, 64 bytes an entry; other bytes are only marked as high.
pub(crate) fn classify(text: &[u8], masks: &mut Vec<Masks>) {
    masks.clear();
    masks.reserve(text.len() / 64 + 2);
    let blocks = text.chunks_exact(64);
    let tail = blocks.remainder();
    let blocks = blocks.filter_map(|block| block.first_chunk());
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as just asked.
        unsafe { avx2::classify(blocks, masks) };
        push_tail(tail, masks);
        return;
    }
    masks.extend(blocks.map(classify_portable));
    push_tail(tail, masks);
}

/// The last, partial block and an empty one behind it, so that each block has a next one.
fn push_tail(tail: &[u8], masks: &mut Vec<Masks>) {
    let mut block = [0u8; 64];
    block[..tail.len()].copy_from_slice(tail);
    let valid = if tail.is_empty() { 0 } else { u64::MAX >> (64 - tail.len()) };
    if valid != 0 {
        masks.push(Masks { valid, ..classify_portable(&block) });
    }
    masks.push(Masks::default());
}

const LETTER: u8 = 1;
const NUMBER: u8 = 2;
const SPACE: u8 = 4;
const NEWLINE: u8 = 8;
const BLANK: u8 = 16;
const APOSTROPHE: u8 = 32;
const HIGH: u8 = 64;
const CONTINUATION: u8 = 128;

static BYTE_CLASS: [u8; 256] = byte_classes();

const fn byte_classes() -> [u8; 256] {
    let mut table = [0u8; 256];
    let mut index = 0usize;
    while index < 256 {
        let byte = index as u8;
        table[index] = match byte {
            b'a'..=b'z' | b'A'..=b'Z' => LETTER,
            b'0'..=b'9' => NUMBER,
            b'\r' | b'\n' => SPACE | NEWLINE,
            b'\t' | 0x0B | 0x0C => SPACE,
            b' ' => SPACE | BLANK,
            b'\'' => APOSTROPHE,
            0x80..=0xBF => HIGH | CONTINUATION,
            0xC0..=0xFF => HIGH,
            _ => 0,
        };
        index += 1;
    }
    table
}

fn classify_portable(block: &[u8; 64]) -> Masks {
    let mut masks = Masks { valid: u64::MAX, ..Masks::default() };
    for (bit, &byte) in block.iter().enumerate() {
        let class = BYTE_CLASS[usize::from(byte)];
        let put = |mask: u8, shift: u32| u64::from(class & mask != 0) << shift;
        let shift = bit as u32;
        masks.letter |= put(LETTER, shift);
        masks.number |= put(NUMBER, shift);
        masks.space |= put(SPACE, shift);
        masks.newline |= put(NEWLINE, shift);
        masks.blank |= put(BLANK, shift);
        masks.apostrophe |= put(APOSTROPHE, shift);
        masks.high |= put(HIGH, shift);
        masks.continuation |= put(CONTINUATION, shift);
        masks.slash |= u64::from(byte == b'/') << shift;
        masks.upper |= u64::from(byte.is_ascii_uppercase()) << shift;
    }
    masks
}

/// Views bytes as groups of four; what is left over is not seen. (`slice::as_chunks` is newer than the oldest compiler
/// that must build this.)
#[inline]
pub(crate) fn as_chunks_of_4(bytes: &[u8]) -> &[[u8; 4]] {
    // SAFETY: `len / 4 * 4` initialised bytes at an address that needs no alignment.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<[u8; 4]>(), bytes.len() / 4) }
}

/// Makes room for `more` elements behind those of a vector. Large room is asked for in large pages: what encoding writes is
/// new memory, and small pages of it cost more time than what fills them.
#[inline]
pub(crate) fn make_room<T: Copy>(vector: &mut Vec<T>, more: usize) {
    if vector.capacity() - vector.len() < more {
        grow(vector, more);
    }
}

#[cold]
fn grow<T: Copy>(vector: &mut Vec<T>, more: usize) {
    if vector.len() < vector.capacity() / 2 {
        // Growing in place would carry over, and so touch, all room that nothing was written to.
        let mut roomier = Vec::with_capacity(vector.len() + more);
        advise_huge_pages(&roomier);
        roomier.extend_from_slice(vector);
        *vector = roomier;
    } else {
        vector.reserve(more);
        advise_huge_pages(vector);
    }
}

/// Asks the system to back a large vector, and the room behind its elements, with large pages: fewer misses of the address
/// translation, and one interruption for 2 MB instead of 512.
pub(crate) fn advise_huge_pages<T>(vector: &Vec<T>) {
    const PAGE: usize = 4096;
    // Whole pages outward: a mapping of which only a part was advised would be two to the system, and could not be
    // moved as one when its vector grows.
    let (back, bytes) = (vector.as_ptr() as usize % PAGE, vector.capacity() * size_of::<T>());
    if bytes > 2 << 20 {
        let start = vector.as_ptr().cast::<u8>().wrapping_sub(back).cast_mut();
        // SAFETY: each page of the range holds a byte of the vector's room.
        unsafe { advise(start, (back + bytes).next_multiple_of(PAGE)) };
    }
}

/// A table of fixed length, on large pages if it is large enough to gain by them: a walk through a trie of some
/// megabytes misses the address translation at most steps, which on a virtual machine costs as much as the read itself.
pub(crate) struct Fixed<T> {
    start: NonNull<T>,
    len: usize,
    layout: Layout,
}

impl<T: Copy> From<Vec<T>> for Fixed<T> {
    fn from(vector: Vec<T>) -> Self {
        const LARGE_PAGE: usize = 2 << 20;
        let (len, bytes) = (vector.len(), vector.len() * size_of::<T>());
        // A small table takes the memory of its elements only.
        let page = if bytes >= LARGE_PAGE / 8 { LARGE_PAGE } else { 64 };
        let layout = Layout::from_size_align(bytes.max(1).next_multiple_of(page), page.max(align_of::<T>()))
            .expect("a vector is smaller than the address space");
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc(layout) }.cast::<T>();
        let start = NonNull::new(start).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        if page == LARGE_PAGE {
            // SAFETY: the range is that of the allocation.
            unsafe { advise(start.as_ptr().cast(), layout.size()) };
        }
        // SAFETY: `start` has room for `len` elements, aligned for them; the vector is another allocation.
        unsafe { std::ptr::copy_nonoverlapping(vector.as_ptr(), start.as_ptr(), len) };
        Self { start, len, layout }
    }
}

impl<T> std::ops::Deref for Fixed<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were written there, and they are borrowed as this is.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> std::ops::DerefMut for Fixed<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Fixed<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; `T` is `Copy`, so there is nothing to drop in it.
        unsafe { std::alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
    }
}

// SAFETY: it owns its elements and borrows them as itself is borrowed, like a boxed slice.
unsafe impl<T: Send> Send for Fixed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Fixed<T> {}

/// Asks for large pages under a range of whole pages.
///
/// # Safety
/// Each page of the range must hold a byte of a live allocation.
unsafe fn advise(start: *mut u8, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))] // which has no pages
    {
        // SAFETY: the pages are mapped, says the caller; the advice changes no content of them.
        let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, bytes);
}

/// Asks for a cache line that will be read soon.
#[inline]
pub(crate) fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: prefetching reads nothing and cannot fault, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                slice.as_ptr().wrapping_add(index).cast(),
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::Masks;

    /// Highest bits of all bytes.
    ///
    /// The intrinsic of this name is a comparison to the compiler, which then joins the masks of two halves into a vector
    /// of 64 flags and takes it apart flag by flag: ten times slower than the instruction.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn movemask(vector: __m256i) -> u32 {
        let bits: u32;
        // SAFETY: one instruction of AVX2 from register to register.
        unsafe {
            std::arch::asm!("vpmovmskb {0:e}, {1}", out(reg) bits, in(ymm_reg) vector,
                options(pure, nomem, nostack, preserves_flags));
        }
        bits
    }

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn classify<'a>(blocks: impl Iterator<Item = &'a [u8; 64]>, masks: &mut Vec<Masks>) {
        /// Bits of a test on both halves.
        macro_rules! both {
            ($low:expr, $high:expr, $test:ident $(, $argument:expr)*) => {
                u64::from(movemask($test!($low $(, $argument)*)))
                    | u64::from(movemask($test!($high $(, $argument)*))) << 32
            };
        }
        macro_rules! same {
            ($vector:expr) => {
                $vector
            };
        }
        macro_rules! equal {
            ($vector:expr, $byte:expr) => {
                _mm256_cmpeq_epi8($vector, _mm256_set1_epi8($byte as i8))
            };
        }
        /// `first <= byte < first + count`, by wrapping: `byte - first <= count - 1` as unsigned numbers.
        macro_rules! within {
            ($vector:expr, $first:expr, $count:expr) => {{
                let shifted = _mm256_sub_epi8($vector, _mm256_set1_epi8($first as i8));
                _mm256_cmpeq_epi8(_mm256_min_epu8(shifted, _mm256_set1_epi8($count - 1)), shifted)
            }};
        }
        macro_rules! either {
            ($vector:expr, $first:expr, $second:expr) => {
                _mm256_or_si256(equal!($vector, $first), equal!($vector, $second))
            };
        }
        for block in blocks {
            // SAFETY: both loads lie within the 64 bytes of the block and need no alignment; all other instructions work
            // on values, and the caller vouches for AVX2.
            masks.push(unsafe {
                let pointer = block.as_ptr().cast::<__m256i>();
                let (low, high) = (_mm256_loadu_si256(pointer), _mm256_loadu_si256(pointer.add(1)));
                let fold = _mm256_set1_epi8(0x20);
                let (low_folded, high_folded) = (_mm256_or_si256(low, fold), _mm256_or_si256(high, fold));
                let blank = both!(low, high, equal, b' ');
                let high_bytes = both!(low, high, same);
                Masks {
                    letter: both!(low_folded, high_folded, within, b'a', 26),
                    number: both!(low, high, within, b'0', 10),
                    space: blank | both!(low, high, within, 9, 5),
                    newline: both!(low, high, either, b'\n', b'\r'),
                    blank,
                    apostrophe: both!(low, high, equal, b'\''),
                    slash: both!(low, high, equal, b'/'),
                    upper: both!(low, high, within, b'A', 26),
                    caseless: 0,
                    continuation: if high_bytes == 0 { 0 } else { both!(low, high, within, 0x80u8, 0x40) },
                    high: high_bytes,
                    valid: u64::MAX,
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_classes_equal_the_portable_ones() {
        let text: Vec<u8> = (0..64 * 1024u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for len in [0, 1, 63, 64, 65, 127, 128, 1000, text.len()] {
            let mut masks = Vec::new();
            classify(&text[..len], &mut masks);
            assert_eq!(masks.len(), len.div_ceil(64) + 1);
            for (block, found) in text[..len].chunks(64).zip(&masks) {
                let mut padded = [0; 64];
                padded[..block.len()].copy_from_slice(block);
                let valid = u64::MAX >> (64 - block.len());
                assert_eq!(*found, Masks { valid, ..classify_portable(&padded) });
            }
            assert_eq!(masks.last(), Some(&Masks::default()));
        }
    }
}

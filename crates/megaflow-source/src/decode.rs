//! Compressed streams to bytes. A damaged or short stream is an error of the whole input, never a silent end.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::GzDecoder;

use crate::access::{ContentHash, HashingReader};
use crate::content::Compression;

/// Window of a Zstandard frame as large as the format allows (`--long=31`).
const ZSTD_WINDOW_LOG_MAX: u32 = 31;
const BUFFER_BYTES: usize = 1 << 20;

type Raw = BufReader<HashingReader>;

/// An input, unpacked. All members, frames or streams of a file follow one another.
pub(crate) enum Decoded {
    Plain(Raw),
    Gzip(GzipMembers),
    Zstd(zstd::stream::read::Decoder<'static, Raw>),
    Bzip2(Box<bzip2::bufread::MultiBzDecoder<Raw>>),
    Xz(liblzma::bufread::XzDecoder<Raw>),
}

impl Decoded {
    pub(crate) fn new(compression: Compression, raw: HashingReader) -> io::Result<Self> {
        let raw = BufReader::with_capacity(BUFFER_BYTES, raw);
        Ok(match compression {
            Compression::None => Self::Plain(raw),
            Compression::Gzip => Self::Gzip(GzipMembers(Some(GzDecoder::new(raw)))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(raw)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Self::Zstd(decoder)
            }
            Compression::Bzip2 => Self::Bzip2(Box::new(bzip2::bufread::MultiBzDecoder::new(raw))),
            Compression::Xz => Self::Xz(liblzma::bufread::XzDecoder::new_multi_decoder(raw)),
        })
    }

    /// Size and hashes of the packed bytes read so far.
    pub(crate) fn content(&self) -> ContentHash {
        self.raw().content()
    }

    /// Packed bytes read so far.
    pub(crate) fn input_bytes(&self) -> u64 {
        self.raw().bytes()
    }

    fn raw(&self) -> &HashingReader {
        match self {
            Self::Plain(raw) => raw.get_ref(),
            Self::Gzip(members) => members.decoder().get_ref().get_ref(),
            Self::Zstd(decoder) => decoder.get_ref().get_ref(),
            Self::Bzip2(decoder) => decoder.get_ref().get_ref(),
            Self::Xz(decoder) => decoder.get_ref().get_ref(),
        }
    }
}

impl Read for Decoded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(raw) => raw.read(buffer),
            Self::Gzip(members) => members.read(buffer),
            Self::Zstd(decoder) => decoder.read(buffer),
            Self::Bzip2(decoder) => decoder.read(buffer),
            Self::Xz(decoder) => decoder.read(buffer),
        }
    }
}

/// The members of a gzip file, one after the other. Zeros behind a member, which tapes and block devices leave, are passed
/// over, as by gzip itself; anything else there is an error.
pub(crate) struct GzipMembers(Option<GzDecoder<Raw>>);

impl GzipMembers {
    fn decoder(&self) -> &GzDecoder<Raw> {
        self.0.as_ref().expect("put back by each read")
    }

    /// Goes to the next member; false at the end of the file.
    fn next_member(&mut self) -> io::Result<bool> {
        let decoder = self.0.as_mut().expect("put back by each read");
        let raw = decoder.get_mut();
        loop {
            let ahead = raw.fill_buf()?;
            if ahead.is_empty() {
                return Ok(false);
            }
            let zeros = ahead.iter().take_while(|&&byte| byte == 0).count();
            let has_member = zeros < ahead.len();
            raw.consume(zeros);
            if has_member {
                let raw = self.0.take().expect("it is there above").into_inner();
                self.0 = Some(GzDecoder::new(raw));
                return Ok(true);
            }
        }
    }
}

impl Read for GzipMembers {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let decoder = self.0.as_mut().expect("put back by each read");
            let count = decoder.read(buffer)?;
            if count > 0 || buffer.is_empty() || !self.next_member()? {
                return Ok(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn packed(compression: Compression, bytes: &[u8]) -> Vec<u8> {
        match compression {
            Compression::None => bytes.to_vec(),
            Compression::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Zstd => zstd::stream::encode_all(bytes, 1).unwrap(),
            Compression::Bzip2 => {
                let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Xz => {
                let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    fn unpack(file: Vec<u8>) -> io::Result<(Vec<u8>, ContentHash)> {
        let compression = Compression::of(&file);
        let mut decoded = Decoded::new(compression, HashingReader::stream(Box::new(io::Cursor::new(file))))?;
        let mut bytes = Vec::new();
        decoded.read_to_end(&mut bytes)?;
        Ok((bytes, decoded.content()))
    }

    const ALL: [Compression; 4] = [Compression::Gzip, Compression::Zstd, Compression::Bzip2, Compression::Xz];

    fn text() -> Vec<u8> {
        (0..20_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
    }

    #[test]
    fn several_members_are_read_to_the_last_byte() {
        for compression in ALL {
            let file = [packed(compression, b"one\n"), packed(compression, b""), packed(compression, &text())].concat();
            let (bytes, content) = unpack(file.clone()).unwrap();
            assert_eq!(bytes, [b"one\n".to_vec(), text()].concat(), "{compression:?}");
            assert_eq!(content.bytes, file.len() as u64, "{compression:?}");
            assert_eq!(content.xxh3_64, [xxhash_rust::xxh3::xxh3_64(&file)]);
        }
    }

    #[test]
    fn zeros_behind_a_member_of_gzip_are_passed_over_and_nothing_else_is() {
        let gzip = |bytes: &[u8]| packed(Compression::Gzip, bytes);
        let zeros = |count| vec![0; count];
        for padding in [1, 10_240, 3 << 20] {
            let file = [gzip(b"one\n"), zeros(padding), gzip(b"two\n"), zeros(padding)].concat();
            let (bytes, content) = unpack(file.clone()).unwrap();
            assert_eq!(bytes, b"one\ntwo\n");
            assert_eq!(content.bytes, file.len() as u64);
        }
        for rubbish in [b"x".as_slice(), b"\x1f\x8b", b"not a member at all"] {
            for padding in [0, 7] {
                assert!(unpack([gzip(b"one\n"), zeros(padding), rubbish.to_vec()].concat()).is_err(), "{rubbish:?}");
            }
        }
    }

    #[test]
    fn a_stream_cut_short_anywhere_is_an_error() {
        for compression in ALL {
            let whole = packed(compression, &text());
            for cut in [whole.len() - 1, whole.len() - 9, whole.len() / 2, 20] {
                assert!(unpack(whole[..cut].to_vec()).is_err(), "{compression:?} cut to {cut}");
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_an_error() {
        for compression in [Compression::Gzip, Compression::Bzip2, Compression::Xz] {
            let mut file = packed(compression, &text());
            let middle = file.len() / 2;
            file[middle] ^= 1;
            assert!(unpack(file).is_err(), "{compression:?}");
        }
    }

    #[test]
    fn skippable_frames_and_long_windows_of_zstandard_are_read() {
        let skippable = [b"\x53\x2a\x4d\x18\x03\x00\x00\x00abc".to_vec(), packed(Compression::Zstd, b"x")].concat();
        assert_eq!(unpack(skippable).unwrap().0, b"x");
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.long_distance_matching(true).unwrap();
        encoder.window_log(28).unwrap();
        encoder.write_all(&text()).unwrap();
        assert_eq!(unpack(encoder.finish().unwrap()).unwrap().0, text());
    }
}

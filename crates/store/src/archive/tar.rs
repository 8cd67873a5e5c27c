//! Tar headers: parsing and writing, no I/O.
//!
//! The `tar` crate interprets more than a snapshot archive may hold (sparse members, long names,
//! links), and says neither where a member has to begin nor how much it read to find out. An
//! archive needs a header of 512 bytes and two records of the POSIX extended one; all else is
//! refused.

use std::ops::Range;

use crate::format::error::ArchiveError;

/// Bytes of a header; members are padded to a multiple of it.
pub(super) const BLOCK: u64 = 512;
/// Longest extended header that is read.
pub(super) const MAX_EXTENDED: u64 = 64 << 10;

const NAME: Range<usize> = 0..100;
const MODE: Range<usize> = 100..108;
const SIZE: Range<usize> = 124..136;
const CHECKSUM: Range<usize> = 148..156;
const KIND: usize = 156;
const MAGIC: Range<usize> = 257..265;
const PREFIX: Range<usize> = 345..500;

/// The fields of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: Vec<u8>,
    pub(super) size: u64,
    pub(super) kind: u8,
}

/// Parses the header at byte `at`; `None` for the zeros that end an archive.
pub(super) fn parse(block: &[u8; BLOCK as usize], at: u64) -> Result<Option<Header>, ArchiveError> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let posix = match &block[MAGIC] {
        b"ustar\x0000" => true,
        b"ustar  \0" => false,
        _ => return Err(ArchiveError::Header(at)),
    };
    let stored = number(&block[CHECKSUM]).ok_or(ArchiveError::Checksum(at))?;
    if stored != checksum(block) {
        return Err(ArchiveError::Checksum(at));
    }
    let size = number(&block[SIZE]).ok_or(ArchiveError::Number(at))?;
    let mut name = text(&block[NAME]).to_vec();
    let prefix = text(&block[PREFIX]);
    if posix && !prefix.is_empty() {
        name = [prefix, b"/", &name].concat();
    }
    Ok(Some(Header { name, size, kind: block[KIND] }))
}

/// The header of a read-only file. The name is written by this crate and fits.
pub(super) fn header(name: &str, size: u64) -> [u8; BLOCK as usize] {
    let mut block = [0; BLOCK as usize];
    let mut put = |field: Range<usize>, bytes: &[u8]| {
        block[field.start..field.start + bytes.len()].copy_from_slice(bytes);
    };
    put(NAME, name.as_bytes());
    put(MODE, b"0000444\0");
    // Owner, group and time say nothing, so that equal snapshots have equal archives.
    put(108..116, b"0000000\0");
    put(116..124, b"0000000\0");
    if size < 1 << 33 {
        put(SIZE, format!("{size:011o}\0").as_bytes());
    } else {
        put(SIZE, &[0x80, 0, 0, 0]);
        put(SIZE.start + 4..SIZE.end, &size.to_be_bytes());
    }
    put(136..148, b"00000000000\0");
    put(KIND..KIND + 1, b"0");
    put(MAGIC, b"ustar\x0000");
    let sum = checksum(&block);
    block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// The sum of all bytes, those of the checksum itself taken for spaces.
fn checksum(block: &[u8; BLOCK as usize]) -> u64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    sum(&block[..CHECKSUM.start]) + 8 * u64::from(b' ') + sum(&block[CHECKSUM.end..])
}

/// Up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// Octal digits, or a binary number after a byte of 0x80.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] == 0x80 {
        let (high, low) = field[1..].split_at(field.len() - 9);
        let mut word = [0; 8];
        word.copy_from_slice(low);
        return high.iter().all(|byte| *byte == 0).then(|| u64::from_be_bytes(word));
    }
    let digits = text(field).trim_ascii();
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// The changes of a POSIX extended header to the next header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExtendedHeader {
    pub(super) path: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
}

/// Parses records of the form `<length> <key>=<value>\n`. Times and owners are ignored; what would
/// make the member another kind of file is refused.
pub(super) fn parse_extended(mut bytes: &[u8]) -> Option<ExtendedHeader> {
    let mut out = ExtendedHeader::default();
    while !bytes.is_empty() {
        let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
        let len: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
        let record = bytes.get(space + 1..len)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        match key {
            b"path" => out.path = Some(value.to_vec()),
            b"size" => out.size = Some(std::str::from_utf8(value).ok()?.parse().ok()?),
            b"linkpath" => return None,
            _ if key.starts_with(b"GNU.sparse") => return None,
            _ => {}
        }
        bytes = &bytes[len..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_at_every_size() {
        for size in [0, 1, 4096, (1 << 33) - 1, 1 << 33, u64::MAX] {
            let read = parse(&header("blobs/x", size), 0).unwrap().unwrap();
            assert_eq!(read, Header { name: b"blobs/x".to_vec(), size, kind: b'0' });
        }
        assert_eq!(parse(&[0; 512], 0), Ok(None));
    }

    #[test]
    fn a_changed_bit_of_a_header_is_noticed() {
        let block = header("index.json", 77);
        for bit in 0..512 * 8 {
            let mut damaged = block;
            damaged[bit / 8] ^= 1 << (bit % 8);
            // Spaces and NULs around the checksum mean the same.
            let read = parse(&damaged, 0);
            assert!(read.is_err() || read == parse(&block, 0), "bit {bit}: {read:?}");
        }
    }

    #[test]
    fn extended_headers_give_name_and_size_and_nothing_else() {
        let read = parse_extended(b"30 mtime=1350244992.023960108\n12 path=a/b\n13 size=4096\n");
        assert_eq!(read, Some(ExtendedHeader { path: Some(b"a/b".to_vec()), size: Some(4096) }));
        for bad in [
            "12 path=a/b",
            "13 path=a/b\n",
            "99999999999999999999 path=a\n",
            "-1 path=a\n",
            "0 path=a\n",
            "2 \n",
            "22 GNU.sparse.major=1\n",
            "14 linkpath=x\n",
            "11 size=-1\n",
        ] {
            assert_eq!(parse_extended(bad.as_bytes()), None, "{bad:?}");
        }
    }
}

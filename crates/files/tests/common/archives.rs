//! Tars for tests, with any names.

use std::io::Write;

/// One entry of a tar.
pub(crate) fn entry(
    out: &mut tar::Builder<impl Write>,
    name: &str,
    kind: tar::EntryType,
    target: &str,
    bytes: &[u8],
) {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
    header.set_entry_type(kind);
    header.set_size(bytes.len() as u64);
    header.set_mode(0o640);
    header.set_cksum();
    out.append(&header, bytes).unwrap();
}

/// A tar of such entries: name, kind, target of a link, bytes.
pub(crate) fn tarred(entries: &[(&str, tar::EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut out = tar::Builder::new(Vec::new());
    for (name, kind, target, bytes) in entries {
        entry(&mut out, name, *kind, target, bytes);
    }
    out.into_inner().unwrap()
}

/// A plain file.
pub(crate) const FILE: tar::EntryType = tar::EntryType::Regular;

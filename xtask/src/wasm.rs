//! A first look at a Wasm file: is it the intended build, and does it have the required exports?
//!
//! Reads the header and the export section only; the engine validates the code.

use anyhow::{Context, Result, bail};

/// A core module or a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Module,
    Component,
}

/// Fails unless `bytes` are of the kind `kind` and export all of `names`.
pub(crate) fn check(bytes: &[u8], kind: Kind, names: &[&str]) -> Result<()> {
    let mut reader = Reader { bytes };
    let found = match reader.take(8)? {
        b"\0asm\x01\0\0\0" => Kind::Module,
        b"\0asm\x0d\0\x01\0" => Kind::Component,
        _ => bail!("not a Wasm module or component"),
    };
    if found != kind {
        bail!("expected a {kind:?}, found a {found:?}");
    }
    let exports = exports(&mut reader, kind)?;
    let missing: Vec<&str> = names.iter().copied().filter(|name| !exports.contains(name)).collect();
    if !missing.is_empty() {
        bail!("missing exports: {}; exported: {}", missing.join(", "), exports.join(", "));
    }
    Ok(())
}

/// The names of all exports, in order.
fn exports<'a>(reader: &mut Reader<'a>, kind: Kind) -> Result<Vec<&'a str>> {
    let export_section = match kind {
        Kind::Module => 7,
        Kind::Component => 11,
    };
    let mut names = Vec::new();
    while !reader.bytes.is_empty() {
        let id = reader.byte()?;
        let size = reader.number()?;
        let mut section = Reader { bytes: reader.take(size)? };
        if id != export_section {
            continue;
        }
        for _ in 0..section.number()? {
            match kind {
                Kind::Module => {
                    names.push(section.name()?);
                    section.byte()?;
                    section.number()?;
                }
                Kind::Component => {
                    section.byte()?;
                    names.push(section.name()?);
                    // The sort, in two bytes when it is one of the core sorts.
                    if section.byte()? == 0 {
                        section.byte()?;
                    }
                    section.number()?;
                    // The type that the export is given, if any: its sort and index, or one more
                    // byte for the bounds that a type export has.
                    if section.byte()? == 1 {
                        if section.byte()? == 3 {
                            section.byte()?;
                        }
                        section.number()?;
                    }
                }
            }
        }
    }
    Ok(names)
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, tail) = self.bytes.split_at_checked(count).context("the file ends too early")?;
        self.bytes = tail;
        Ok(head)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// An unsigned 32-bit number in LEB128.
    fn number(&mut self) -> Result<usize> {
        let mut number = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return usize::try_from(number).context("a number is too large");
            }
        }
        bail!("a number is too long")
    }

    fn name(&mut self) -> Result<&'a str> {
        let length = self.number()?;
        std::str::from_utf8(self.take(length)?).context("an export's name is not UTF-8")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module that exports a memory `memory` and, after a custom section, a function `go`.
    const MODULE: &[u8] =
        b"\0asm\x01\0\0\0\x00\x02\x01x\x07\x0f\x02\x06memory\x02\x00\x02go\x00\x00";
    /// A component that exports a function `go` with index 0 and no type.
    const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0\x0b\x08\x01\x00\x02go\x01\x00\x00";

    #[test]
    fn exports_of_modules_and_components_are_found() -> Result<()> {
        check(MODULE, Kind::Module, &["go", "memory"])?;
        check(COMPONENT, Kind::Component, &["go"])
    }

    #[test]
    fn missing_tools_are_named() {
        let error = check(MODULE, Kind::Module, &["go", "warm"]).expect_err("no warm");
        assert_eq!(error.to_string(), "missing exports: warm; exported: memory, go");
    }

    #[test]
    fn the_wrong_kind_other_files_and_cut_files_are_refused() {
        assert!(check(MODULE, Kind::Component, &[]).is_err());
        assert!(check(COMPONENT, Kind::Module, &[]).is_err());
        assert!(check(b"#!/bin/sh\n", Kind::Module, &[]).is_err());
        for length in [0, 3, 9, 12, 20, MODULE.len() - 1] {
            assert!(check(&MODULE[..length], Kind::Module, &["go"]).is_err(), "{length} bytes");
        }
    }
}

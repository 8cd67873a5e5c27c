//! The part of DER that certificates need.

/// Object identifiers, encoded.
pub(crate) const ECDSA_WITH_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
pub(crate) const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
pub(crate) const PRIME256V1: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
pub(crate) const COMMON_NAME: &[u8] = &[0x55, 4, 3];
pub(crate) const SUBJECT_KEY_ID: &[u8] = &[0x55, 29, 14];
pub(crate) const KEY_USAGE: &[u8] = &[0x55, 29, 15];
pub(crate) const SUBJECT_ALT_NAME: &[u8] = &[0x55, 29, 17];
pub(crate) const BASIC_CONSTRAINTS: &[u8] = &[0x55, 29, 19];
pub(crate) const NAME_CONSTRAINTS: &[u8] = &[0x55, 29, 30];
pub(crate) const AUTHORITY_KEY_ID: &[u8] = &[0x55, 29, 35];
pub(crate) const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 29, 37];
pub(crate) const SERVER_AUTH: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 1];

/// Tags of values.
pub(crate) const BOOLEAN: u8 = 0x01;
pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const OBJECT_ID: u8 = 0x06;
pub(crate) const UTF8_STRING: u8 = 0x0c;
pub(crate) const UTC_TIME: u8 = 0x17;
pub(crate) const GENERALIZED_TIME: u8 = 0x18;
pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;

/// A value with its tag and length.
pub(crate) fn value(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    let length = content.len().to_be_bytes();
    match content.len() {
        short @ 0..0x80 => out.push(short as u8),
        _ => {
            let bytes: Vec<u8> = length.into_iter().skip_while(|byte| *byte == 0).collect();
            out.push(0x80 | bytes.len() as u8);
            out.extend(bytes);
        }
    }
    out.extend_from_slice(content);
    out
}

/// A value that consists of others.
pub(crate) fn group(tag: u8, parts: &[Vec<u8>]) -> Vec<u8> {
    value(tag, &parts.concat())
}

/// A string of whole bytes.
pub(crate) fn bit_string(bytes: &[u8]) -> Vec<u8> {
    value(BIT_STRING, &[&[0], bytes].concat())
}

/// An extension of a certificate.
pub(crate) fn extension(id: &[u8], critical: bool, content: &[u8]) -> Vec<u8> {
    let critical = if critical { value(BOOLEAN, &[0xff]) } else { Vec::new() };
    group(SEQUENCE, &[value(OBJECT_ID, id), critical, value(OCTET_STRING, content)])
}

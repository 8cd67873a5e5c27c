//! Each side decodes the other's encoding, or refuses it.

use std::fmt::Debug;

use afresh_vm_abi::{BootInfo, BootRegion, FromWire, HostError, HostReturn, IntoWire, MAX_REGIONS};
use proptest::prelude::*;

fn encode(value: impl IntoWire) -> Vec<u8> {
    let mut bytes = vec![0xee];
    value.into_wire(&mut bytes);
    assert_eq!(bytes.remove(0), 0xee, "it appends");
    bytes
}

/// Decodes all of it.
fn decode<T: FromWire>(bytes: &[u8]) -> Option<T> {
    let mut rest = bytes;
    T::from_wire(&mut rest).filter(|_| rest.is_empty())
}

/// There and back, with nothing after it, with something after it, and cut anywhere.
fn there_and_back<T: FromWire + IntoWire + Clone + PartialEq + Debug>(value: T) {
    let mut bytes = encode(value.clone());
    assert_eq!(decode(&bytes), Some(value.clone()));
    for len in 0..bytes.len() {
        assert_eq!(decode::<T>(&bytes[..len]), None, "{len} bytes of {value:?}");
    }
    let len = bytes.len();
    bytes.extend([7, 7]);
    let mut rest = &bytes[..];
    assert_eq!(T::from_wire(&mut rest), Some(value));
    assert_eq!(bytes.len() - rest.len(), len);
}

proptest! {
    #[test]
    fn every_value_goes_there_and_back(
        unsigned in any::<(u8, u16, u32, u64)>(),
        signed in any::<(i8, i16, i32, i64)>(),
        floats in any::<(f32, f64)>(),
        flag in any::<bool>(),
        bytes in any::<Vec<u8>>(),
        text in any::<String>(),
    ) {
        there_and_back(unsigned.0);
        there_and_back(unsigned.1);
        there_and_back(unsigned.2);
        there_and_back(unsigned.3);
        there_and_back(signed.0);
        there_and_back(signed.1);
        there_and_back(signed.2);
        there_and_back(signed.3);
        there_and_back(floats.0);
        there_and_back(floats.1);
        there_and_back(flag);
        prop_assert_eq!(encode(bytes.as_slice()), encode(bytes.clone()));
        prop_assert_eq!(encode(text.as_str()), encode(text.clone()));
        there_and_back(bytes);
        there_and_back(text);
    }

    #[test]
    fn every_decoded_message_encodes_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
        macro_rules! check {
            ($($kind:ty),*) => {$(
                let mut rest = &bytes[..];
                if let Some(value) = <$kind>::from_wire(&mut rest) {
                    prop_assert_eq!(&encode(value)[..], &bytes[..bytes.len() - rest.len()]);
                }
            )*};
        }
        check!(u8, u16, u32, u64, i8, i16, i32, i64, bool, Vec<u8>, String, ());
    }
}

#[test]
fn two_is_no_boolean() {
    assert_eq!(decode::<bool>(&[0]), Some(false));
    assert_eq!(decode::<bool>(&[1]), Some(true));
    for byte in 2..=255 {
        assert_eq!(decode::<bool>(&[byte]), None);
    }
}

#[test]
fn a_length_of_more_than_there_is_allocates_nothing_and_is_refused() {
    for len in [1, 5, u32::MAX] {
        let mut bytes = len.to_le_bytes().to_vec();
        assert_eq!(decode::<Vec<u8>>(&bytes), None);
        assert_eq!(decode::<String>(&bytes), None);
        bytes.extend([0xff; 1]);
        assert_eq!(decode::<String>(&bytes), None, "one byte, and not text");
    }
}

#[test]
fn a_host_function_returns_a_value_or_an_error() {
    assert_eq!(7_u16.encode(), Ok(vec![7, 0]));
    assert_eq!(Ok::<_, HostError>(true).encode(), Ok(vec![1]));
    assert_eq!(Err::<(), _>(HostError::Failed).encode(), Err(HostError::Failed));
    assert_eq!(().encode(), Ok(Vec::new()));
}

#[test]
fn the_boot_page_is_the_structure_word_for_word() {
    let mut regions = [BootRegion::default(); MAX_REGIONS];
    for (index, region) in regions.iter_mut().enumerate() {
        let index = index as u64;
        *region = BootRegion { address: 1000 + index, len: 2000 + index, kind: index % 4 };
    }
    let info = BootInfo {
        magic: 1,
        version: 2,
        region_count: 3,
        heap: 4,
        heap_len: 5,
        input: 6,
        input_capacity: 7,
        stack: 8,
        stack_len: 9,
        regions,
    };
    let words: Vec<u64> = info.words().collect();
    assert_eq!(words.len() * 8, size_of::<BootInfo>());
    assert_eq!(words[..8], [1, 2 | 3 << 32, 4, 5, 6, 7, 8, 9]);
    assert_eq!(words[8..14], [1000, 2000, 0, 1001, 2001, 1]);
    let in_memory = (&raw const info).cast::<u64>();
    for (index, word) in words.iter().enumerate() {
        // SAFETY: the structure has no padding and consists of that many words, aligned as such.
        assert_eq!(unsafe { in_memory.add(index).read() }, *word, "word {index}");
    }
}

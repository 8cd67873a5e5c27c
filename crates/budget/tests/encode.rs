//! A value that cannot be decoded within the limit is not encoded, and few values are decoded to
//! find out.

use afresh_budget::meter::{Meter, total};
use afresh_budget::{DecodeError, MAX_DECODED, MAX_UNCHECKED, decode, encode};

#[global_allocator]
static METER: Meter = Meter;

#[test]
fn what_is_encoded_can_be_decoded() {
    let lists = |count: usize| vec![Vec::<u64>::new(); count];
    assert_eq!(encode(&lists(7_000_000)), Err(DecodeError::Exceeded { limit: MAX_DECODED }));
    let bytes = encode(&lists(3_000_000)).unwrap();
    assert_eq!(decode(&bytes, MAX_DECODED).unwrap(), (lists(3_000_000), &[][..]));
}

#[test]
fn strings_are_not_decoded_to_be_measured() {
    let text = "x".repeat(16 * MAX_UNCHECKED);
    let (bytes, allocated) = total(|| encode(&text).unwrap());
    assert_eq!(bytes, postcard::to_allocvec(&text).unwrap());
    // A copy would be the third.
    assert!(allocated < text.len() * 5 / 2, "{allocated} bytes");
}

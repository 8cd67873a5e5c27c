//! The memory of a decoded value is subtracted from the limit: for values of every shape, as large
//! as their bytes can make them.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;

use afresh_budget::meter::{Meter, peak, within};
use afresh_budget::{DecodeError, Decoder, Encoder, MAX_DECODED, decode};
use serde::{Deserialize, Serialize};

#[global_allocator]
static METER: Meter = Meter;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct LargeItem {
    words: [u64; 32],
    name: Option<String>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Part {
    None,
    Boxed(Box<LargeItem>),
    Pair { left: Vec<u8>, right: (u16, i128) },
    Many(BTreeMap<u8, Vec<Part>>),
}

/// Bytes that are decoded, and subtracted at most so often as they are taken.
fn check<T: for<'de> Deserialize<'de> + Serialize + PartialEq + Debug>(value: &T) {
    let bytes = postcard::to_allocvec(value).unwrap();
    let (decoded, taken) = peak(|| decode::<T>(&bytes, usize::MAX).unwrap());
    assert!(decoded.0 == *value && decoded.1.is_empty());
    // The smallest limit under which it is decoded.
    let (mut low, mut high) = (0, 1 << 30);
    while low < high {
        let limit = (low + high) / 2;
        match decode::<T>(&bytes, limit) {
            Ok(_) => high = limit,
            Err(error) => {
                assert_eq!(error, DecodeError::Exceeded { limit });
                low = limit + 1;
            }
        }
    }
    println!("{}: {taken} taken, {low} subtracted", std::any::type_name::<T>());
    assert!(taken <= low, "{taken} taken, {low} subtracted");
}

#[test]
fn no_value_takes_more_than_was_subtracted() {
    for count in [1_u32, 2, 5, 12, 100, 1000, 1025] {
        let each = 0..count;
        check(&vec![Vec::<u64>::new(); count as usize]);
        check(&each.clone().map(|n| vec![n; 1]).collect::<Vec<_>>());
        check(&each.clone().map(|n| BTreeMap::from([(n, [1_u8; 32])])).collect::<Vec<_>>());
        check(&each.clone().map(|n| BTreeSet::from([n])).collect::<Vec<_>>());
        check(&each.clone().map(|n| (n, u64::from(n))).collect::<BTreeMap<_, _>>());
        check(&each.clone().rev().map(|n| (n, ())).collect::<BTreeMap<_, _>>());
        check(&each.clone().map(|n| (n * 0x9e37) as u16).collect::<BTreeSet<_>>());
        check(&each.clone().map(|n| (n, n.to_string())).collect::<HashMap<_, _>>());
        check(&each.clone().map(|n| n as u8).collect::<VecDeque<_>>());
        check(&"x".repeat(count as usize));
        let large = || Box::new(LargeItem { words: [0; 32], name: Some("name".to_owned()) });
        check(&each.clone().map(|_| Part::Boxed(large())).collect::<Vec<_>>());
        check(&each.clone().map(|_| Some(large())).collect::<Vec<_>>());
        let pair = |n| Part::Pair { left: vec![7; n as usize % 50], right: (1, -1) };
        check(&each.clone().map(pair).collect::<Vec<_>>());
        let many = |n| Part::Many(BTreeMap::from([(1, vec![Part::None, pair(n)]), (2, vec![])]));
        check(&each.map(many).collect::<Vec<_>>());
    }
}

#[test]
fn a_length_without_items_reserves_nothing() {
    // Nested lists. Each claims as many items as there are bytes.
    let bytes = [0xff, 0xff, 0x3f].repeat(1 << 20);
    let (decoded, _) = within(64 << 10, || decode::<Vec<Vec<Vec<u64>>>>(&bytes, 32 << 10));
    assert_eq!(decoded.unwrap_err(), DecodeError::Exceeded { limit: 32 << 10 });
}

#[test]
fn items_without_bytes_are_counted() {
    // 2^28 items, none of which has a byte in the input.
    let bytes = [0x80, 0x80, 0x80, 0x80, 1];
    let limit = 64 << 10;
    let list = decode::<Vec<()>>(&bytes, limit).map(drop);
    let map = decode::<HashMap<(), ()>>(&bytes, limit).map(drop);
    assert_eq!([list, map], [(); 2].map(|()| Err(DecodeError::Exceeded { limit })));
}

#[test]
fn other_bytes_are_malformed() {
    let short = decode::<Vec<String>>(&[1, 5, b'x'], 1 << 20);
    assert!(matches!(short, Err(DecodeError::Malformed(_))), "{short:?}");
    let (value, rest) = decode::<Option<u32>>(&[1, 7, 9], 1 << 20).unwrap();
    assert_eq!((value, rest), (Some(7), &[9][..]));
}

#[test]
fn values_one_after_the_other_share_a_limit() {
    const LIMIT: usize = 100_000;
    let bytes = postcard::to_allocvec(&vec![Vec::<u8>::new(); 1000]).unwrap();
    let mut both = Decoder::new(&bytes, LIMIT);
    both.decode::<Vec<Vec<u8>>>().unwrap();
    assert!(both.rest().is_empty());
    // The same bytes once more: alone they fit.
    let refused = both.decode_inner::<Vec<Vec<u8>>>(&bytes).unwrap_err();
    assert_eq!(refused, DecodeError::Exceeded { limit: LIMIT });
    decode::<Vec<Vec<u8>>>(&bytes, LIMIT).unwrap();
}

#[test]
fn values_that_exceed_the_limit_together_are_not_encoded() {
    let value = vec![Vec::<u8>::new(); 4 << 20];
    let encoded = |times: usize| {
        let mut encoder = Encoder::default();
        (0..times).for_each(|_| encoder.encode(&value).unwrap());
        encoder.finish(|decoder| {
            (0..times).try_for_each(|_| decoder.decode::<Vec<Vec<u8>>>().map(drop))
        })
    };
    assert!(encoded(1).is_ok());
    assert_eq!(encoded(2), Err(DecodeError::Exceeded { limit: MAX_DECODED }));
}

//! Lists of bytes in a saved state. Their form is that of every list, but they are decoded as one
//! piece, which takes no more memory than their length.

use std::collections::VecDeque;
use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Makes a list from its bytes.
struct ListVisitor<T>(fn(&[u8]) -> T);

impl<T> Visitor<'_> for ListVisitor<T> {
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("bytes")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<T, E> {
        Ok(self.0(bytes))
    }
}

pub(crate) fn serialize<S: Serializer>(bytes: &impl AsRef<[u8]>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_bytes(bytes.as_ref())
}

pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
where
    T: for<'b> From<&'b [u8]>,
    D: Deserializer<'de>,
{
    from.deserialize_bytes(ListVisitor(|bytes| T::from(bytes)))
}

/// The same for a queue.
pub(crate) mod queue {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(queue: &VecDeque<u8>, to: S) -> Result<S::Ok, S::Error> {
        match queue.as_slices() {
            (bytes, []) => to.serialize_bytes(bytes),
            (first, second) => to.serialize_bytes(&[first, second].concat()),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<VecDeque<u8>, D::Error> {
        from.deserialize_bytes(ListVisitor(|bytes| bytes.to_vec().into()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use afresh_budget::decode;
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Lists {
        #[serde(with = "super")]
        list: Vec<u8>,
        #[serde(with = "super")]
        shared: Arc<[u8]>,
        #[serde(with = "super::queue")]
        queue: VecDeque<u8>,
    }

    #[test]
    fn the_form_is_that_of_lists_and_the_memory_is_their_length() {
        let len = 1 << 20;
        let plain = (vec![1_u8; len], vec![2_u8; len], vec![3_u8; len]);
        let mut queue = VecDeque::from(plain.2.clone());
        queue.rotate_left(len / 2);
        queue.push_back(4);
        queue.pop_back();
        let lists = Lists { list: plain.0.clone(), shared: plain.1.clone().into(), queue };
        let bytes = postcard::to_allocvec(&lists).unwrap();
        assert_eq!(bytes, postcard::to_allocvec(&plain).unwrap());
        assert_eq!(decode(&bytes, 3 * len + 1024), Ok((lists, &[][..])));
    }
}

//! A builder of trees, with which tests and the fuzzer drive the decoder.

use std::collections::HashSet;
use std::fmt;

use super::{BuiltSet, Costs, DecodeError, ObjectBuilder, Pair, Scalar};

/// An object.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree {
    /// The text of another scalar.
    Leaf(String),
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Tree>),
    /// A tuple.
    Tuple(Vec<Tree>),
    /// A set.
    Set(Vec<Tree>),
    /// A map.
    Map(Vec<(Tree, Tree)>),
}

/// A map under construction.
#[derive(Default)]
pub struct TreeMap {
    entries: Vec<(Tree, Tree)>,
    keys: HashSet<String>,
}

/// Makes trees.
#[derive(Default)]
pub struct TreeBuilder {
    /// Calls of its methods.
    pub calls: usize,
}

impl ObjectBuilder for TreeBuilder {
    type Object = Tree;
    type List = Vec<Tree>;
    type Map = TreeMap;
    type Error = DecodeError;

    // A growing vector has room for twice its items, in addition to the old one.
    const COSTS: Costs = Costs {
        slot: 4 * size_of::<Tree>(),
        number: 128,
        text: 8,
        wide: 1,
        list: 8 * size_of::<Tree>(),
        map: 256,
        table: 512,
        entry: 1024,
        member: 1024,
        pair: 512,
        object: 512,
    };

    fn refuse(&self, error: DecodeError) -> DecodeError {
        error
    }

    fn scalar(&mut self, scalar: Scalar<'_>) -> Result<Tree, DecodeError> {
        self.calls += 1;
        let numbers = |words: &[[u8; 8]], shown: fn([u8; 8]) -> String| {
            Tree::List(words.iter().map(|word| Tree::Leaf(shown(*word))).collect())
        };
        Ok(Tree::Leaf(match scalar {
            Scalar::Undefined => "undefined".to_owned(),
            Scalar::Null => "null".to_owned(),
            Scalar::Bool(truth) => truth.to_string(),
            Scalar::Integer(number) => number.to_string(),
            Scalar::Float(number) => format!("{number:?}"),
            Scalar::Text(text) => return Ok(Tree::Text(text.to_owned())),
            Scalar::Bytes(bytes) => return Ok(Tree::Bytes(bytes.to_vec())),
            Scalar::Date(seconds) => format!("date {seconds:?}"),
            Scalar::Timestamp(text) => format!("time {text}"),
            Scalar::Day(text) => format!("day {text}"),
            Scalar::Decimal(text) => format!("decimal {text}"),
            Scalar::Uuid(bytes) => format!("uuid {bytes:x?}"),
            Scalar::Complex(real, imaginary) => format!("{real:?}+{imaginary:?}i"),
            Scalar::Positive(bytes) => return Ok(Tree::Bytes(bytes.to_vec())),
            Scalar::Negative(bytes) => {
                return Ok(Tree::Bytes(bytes.iter().map(|byte| !byte).collect()));
            }
            Scalar::Opaque { kind, text } => format!("{kind} {text}"),
            Scalar::Integers(words) => {
                return Ok(numbers(words, |word| i64::from_le_bytes(word).to_string()));
            }
            Scalar::Floats(words) => {
                return Ok(numbers(words, |word| format!("{:?}", f64::from_le_bytes(word))));
            }
        }))
    }

    fn begin_list(&mut self) -> Result<Vec<Tree>, DecodeError> {
        self.calls += 1;
        Ok(Vec::new())
    }

    fn push(&mut self, list: &mut Vec<Tree>, item: Tree) -> Result<(), DecodeError> {
        self.calls += 1;
        list.push(item);
        Ok(())
    }

    fn list(&mut self, list: Vec<Tree>) -> Result<Tree, DecodeError> {
        Ok(Tree::List(list))
    }

    fn tuple(&mut self, list: Vec<Tree>) -> Result<Tree, DecodeError> {
        Ok(Tree::Tuple(list))
    }

    fn set(&mut self, list: Vec<Tree>) -> Result<BuiltSet<Tree>, DecodeError> {
        self.calls += list.len();
        let mut members = HashSet::new();
        Ok(match list.iter().all(|member| members.insert(member.key())) {
            true => BuiltSet::Set(Tree::Set(list)),
            false => BuiltSet::List(Tree::List(list)),
        })
    }

    fn begin_map(&mut self) -> Result<TreeMap, DecodeError> {
        self.calls += 1;
        Ok(TreeMap::default())
    }

    fn insert(
        &mut self,
        map: &mut TreeMap,
        key: Tree,
        value: Tree,
    ) -> Result<Option<Pair<Tree>>, DecodeError> {
        self.calls += 1;
        if !map.keys.insert(key.key()) {
            return Ok(Some((key, value)));
        }
        map.entries.push((key, value));
        Ok(None)
    }

    fn map(&mut self, map: TreeMap) -> Result<Tree, DecodeError> {
        Ok(Tree::Map(map.entries))
    }

    fn pairs(&mut self, map: TreeMap) -> Result<Vec<Tree>, DecodeError> {
        self.calls += map.entries.len();
        Ok(map.entries.into_iter().map(|(key, value)| Tree::Tuple(vec![key, value])).collect())
    }

    fn pair(&mut self, key: Tree, value: Tree) -> Result<Tree, DecodeError> {
        self.calls += 1;
        Ok(Tree::Tuple(vec![key, value]))
    }
}

impl Tree {
    /// The text that equal keys have in common.
    ///
    /// # Panics
    /// For a map, which the decoder never offers as a key.
    fn key(&self) -> String {
        assert!(!self.has_map(), "a map is a key");
        // Long keys differ in their first bytes and their length.
        let text: String = match self {
            Self::Leaf(text) | Self::Text(text) => text.chars().take(16).collect(),
            Self::Bytes(bytes) => bytes.iter().take(16).map(|byte| char::from(*byte)).collect(),
            Self::List(parts) | Self::Tuple(parts) | Self::Set(parts) => {
                format!("{} {}", parts.len(), parts.first().map_or_else(String::new, Self::key))
            }
            Self::Map(_) => String::new(),
        };
        text.chars().take(16).collect()
    }

    fn has_map(&self) -> bool {
        match self {
            Self::Leaf(_) | Self::Text(_) | Self::Bytes(_) => false,
            Self::Map(_) => true,
            Self::List(parts) | Self::Tuple(parts) | Self::Set(parts) => {
                parts.iter().any(Self::has_map)
            }
        }
    }
}

fn show(parts: &[Tree], out: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (number, part) in parts.iter().enumerate() {
        write!(out, "{}{part}", if number == 0 { "" } else { ", " })?;
    }
    Ok(())
}

impl fmt::Display for Tree {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (begin, parts, end) = match self {
            Self::Leaf(text) => return out.write_str(text),
            Self::Text(text) => return write!(out, "{text:?}"),
            Self::Bytes(bytes) => return write!(out, "b{bytes:x?}"),
            Self::List(parts) => ("[", parts, "]"),
            Self::Tuple(parts) => ("(", parts, ")"),
            Self::Set(parts) => ("set[", parts, "]"),
            Self::Map(entries) => {
                out.write_str("{")?;
                for (number, (key, value)) in entries.iter().enumerate() {
                    write!(out, "{}{key}: {value}", if number == 0 { "" } else { ", " })?;
                }
                return out.write_str("}");
            }
        };
        out.write_str(begin)?;
        show(parts, out)?;
        out.write_str(end)
    }
}

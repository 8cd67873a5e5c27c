//! Extended attributes of files: names with values that programs attach to them.
//!
//! Promises: the budget of the tree pays for each, and the limits of Linux hold: 255 bytes of a
//! name, 64 KiB of a value, and 64 KiB of the names of a file. Files of layers have none until a
//! program attaches one.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::Refused;

/// Bytes that an attribute costs in addition to its name and value.
const ATTRIBUTE_COST: u64 = 64;
/// Maximum bytes of a name.
const MAX_NAME: usize = 255;
/// Maximum bytes of a value.
const MAX_VALUE: usize = 64 << 10;
/// Maximum bytes of the names of a file, each with a zero behind it.
const MAX_NAMES: usize = 64 << 10;

/// The extended attributes of a file. Versions of the file that have the same share them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes(Option<Arc<AttributeMap>>);

/// Values by name.
type AttributeMap = BTreeMap<Arc<[u8]>, Arc<[u8]>>;

impl Attributes {
    /// Names and values, in the order of the names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Arc<[u8]>, &Arc<[u8]>)> + '_ {
        self.0.iter().flat_map(|list| list.iter())
    }

    pub(crate) fn get(&self, name: &[u8]) -> Option<&Arc<[u8]>> {
        self.0.as_ref()?.get(name)
    }

    /// Bytes that the tree pays for them.
    pub(crate) fn cost(&self) -> u64 {
        self.iter().map(|(name, value)| cost(name, value)).sum()
    }

    /// Bytes of all names, each with a zero behind it.
    fn names_len(&self) -> usize {
        self.iter().map(|(name, _)| name.len() + 1).sum()
    }

    /// How much more they cost, and how much less, once `name` has this value or none.
    pub(crate) fn growth(&self, name: &[u8], value: Option<&[u8]>) -> Result<(u64, u64), Refused> {
        check(name, value.unwrap_or_default())?;
        let old = self.get(name);
        if old.is_none() && value.is_some() && self.names_len() + name.len() + 1 > MAX_NAMES {
            return Err(Refused::Full);
        }
        let old = old.map_or(0, |old| cost(name, old));
        let new = value.map_or(0, |value| cost(name, value));
        Ok((new.saturating_sub(old), old.saturating_sub(new)))
    }

    pub(crate) fn set(&mut self, name: &[u8], value: Option<&[u8]>) {
        let list = Arc::make_mut(self.0.get_or_insert_default());
        match value {
            Some(value) => drop(list.insert(name.into(), value.into())),
            None => drop(list.remove(name)),
        }
        if list.is_empty() {
            self.0 = None;
        }
    }

    /// The attributes of a saved file, unless no file could have them.
    pub(crate) fn checked(saved: Vec<(Vec<u8>, Vec<u8>)>) -> Option<Self> {
        let mut last: Option<Arc<[u8]>> = None;
        let mut list = BTreeMap::new();
        for (name, value) in saved {
            let name: Arc<[u8]> = name.into();
            if check(&name, &value).is_err() || last.as_ref().is_some_and(|last| *last >= name) {
                return None;
            }
            last = Some(name.clone());
            list.insert(name, value.into());
        }
        let attributes = Self((!list.is_empty()).then(|| Arc::new(list)));
        (attributes.0.is_some() && attributes.names_len() <= MAX_NAMES).then_some(attributes)
    }
}

/// The cost of an attribute.
fn cost(name: &[u8], value: &[u8]) -> u64 {
    ATTRIBUTE_COST + (name.len() + value.len()) as u64
}

fn check(name: &[u8], value: &[u8]) -> Result<(), Refused> {
    if name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
        return Err(Refused::Invalid);
    }
    if value.len() > MAX_VALUE { Err(Refused::TooLarge) } else { Ok(()) }
}

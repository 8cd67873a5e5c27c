//! Access control lists of files (`system.posix_acl_access` and `system.posix_acl_default`), which
//! are kept as extended attributes.
//!
//! Promises: a list and the mode of its file agree, as in Linux: a list sets the mode, `chmod`
//! changes the list, and a new file in a directory with a default list inherits it. Their entries
//! for further users and groups decide no access.

use afresh_files::{Kind, New, Node, ResolvedName};
use rustix::io::Errno;

use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::result::SyscallResult;

/// The attribute with the list that controls access to a file.
pub(in crate::sentry) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute with the list that a new file in a directory begins with.
pub(in crate::sentry) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// The only version of the format.
const VERSION: u32 = 2;
const HEADER_LEN: usize = 4;
const ENTRY_LEN: usize = 8;
/// The number in an entry that names no user or group.
const NO_ID: u32 = u32::MAX;

// Tags of entries, in the order that they have in a list.
const OWNER: u16 = 1;
const USER: u16 = 2;
const OWNING_GROUP: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// An entry: its tag, three permission bits, and the number of a user or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    bits: u16,
    id: u32,
}

/// A valid access control list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sentry) struct AccessList(Vec<Entry>);

impl AccessList {
    /// The list in the value of an attribute; `None` for an empty one, which removes a list.
    pub(in crate::sentry) fn parse(value: &[u8]) -> Result<Option<Self>, Errno> {
        if value.is_empty() {
            return Ok(None);
        }
        let (version, rest) = value.split_first_chunk::<HEADER_LEN>().ok_or(Errno::INVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno::OPNOTSUPP);
        }
        let (entries, []) = rest.as_chunks::<ENTRY_LEN>() else { return Err(Errno::INVAL) };
        if entries.is_empty() {
            return Ok(None);
        }
        let list: Vec<_> = entries
            .iter()
            .map(|[a, b, c, d, id @ ..]| {
                let tag = u16::from_le_bytes([*a, *b]);
                let id = u32::from_le_bytes(*id);
                let named = matches!(tag, USER | GROUP);
                let bits = u16::from_le_bytes([*c, *d]);
                let valid = bits <= 7 && (!named || id != NO_ID);
                valid.then_some(Entry { tag, bits, id: if named { id } else { NO_ID } })
            })
            .collect::<Option<_>>()
            .ok_or(Errno::INVAL)?;
        let list = Self(list);
        if list.is_valid() { Ok(Some(list)) } else { Err(Errno::INVAL) }
    }

    /// Whether its entries are in order and complete.
    fn is_valid(&self) -> bool {
        let tags = || self.0.iter().map(|entry| entry.tag);
        let known =
            tags().all(|tag| matches!(tag, OWNER | USER | OWNING_GROUP | GROUP | MASK | OTHER));
        let count = |wanted: u16| tags().filter(|tag| *tag == wanted).count();
        let named = count(USER) + count(GROUP) > 0;
        known
            && tags().is_sorted()
            && [OWNER, OWNING_GROUP, OTHER].iter().all(|tag| count(*tag) == 1)
            && count(MASK) <= 1
            && (!named || count(MASK) == 1)
    }

    /// The value of its attribute.
    pub(in crate::sentry) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for Entry { tag, bits, id } in &self.0 {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(bits.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    /// Whether it says no more than a mode does.
    fn is_minimal(&self) -> bool {
        self.0.len() == 3
    }

    /// The entry of a class: the mask stands for the group, if there is one.
    fn class(&mut self, shift: u32) -> &mut u16 {
        let tags: &[u16] = match shift {
            6 => &[OWNER],
            3 => &[MASK, OWNING_GROUP],
            _ => &[OTHER],
        };
        let found = tags.iter().find_map(|tag| self.0.iter().position(|entry| entry.tag == *tag));
        // A valid list has all three.
        &mut self.0[found.unwrap_or_default()].bits
    }

    /// The permission bits of a file with this list.
    fn mode(&mut self) -> u32 {
        [6, 3, 0].iter().map(|shift| u32::from(*self.class(*shift)) << shift).sum()
    }

    /// Gives the classes the bits of a mode, as `chmod` does.
    fn set_mode(&mut self, mode: u32) {
        for shift in [6, 3, 0] {
            *self.class(shift) = (mode >> shift & 7) as u16;
        }
    }
}

/// The mode and the attributes of something new in a directory.
#[derive(Debug)]
pub(in crate::sentry) struct Inheritance {
    pub(in crate::sentry) mode: u32,
    access: Option<Vec<u8>>,
    default: Option<Vec<u8>>,
}

impl Kernel {
    fn access_list(&self, node: Node, name: &[u8]) -> SyscallResult<Option<AccessList>> {
        let value = self.tree.attribute(node, name)?;
        Ok(value.map_or(Ok(None), |value| AccessList::parse(&value))?)
    }

    /// Sets or removes a list of a file. An access list sets the mode; one that a mode can express
    /// is not stored.
    pub(in crate::sentry) fn set_access_list(
        &mut self,
        node: Node,
        name: &[u8],
        list: Option<AccessList>,
    ) -> SyscallResult<()> {
        let (stat, now) = (self.tree.stat(node)?, crate::sentry::kernel::time::now());
        if stat.kind == Kind::Link {
            return Err(Errno::OPNOTSUPP.into());
        }
        if name == DEFAULT {
            if stat.kind != Kind::Directory {
                return if list.is_some() { Err(Errno::ACCESS.into()) } else { Ok(()) };
            }
            let value = list.map(|list| list.to_bytes());
            return Ok(self.tree.set_attribute(node, name, value.as_deref(), now)?);
        }
        let Some(mut list) = list else {
            return Ok(self.tree.set_attribute(node, name, None, now)?);
        };
        let mode = stat.mode & !0o777 | list.mode();
        self.seals.may_turn(node, stat.mode, mode)?;
        let value = (!list.is_minimal()).then(|| list.to_bytes());
        self.tree.set_attribute(node, name, value.as_deref(), now)?;
        Ok(self.tree.set_mode(node, mode, now)?)
    }

    /// Sets the mode of a file, and the classes of its access list.
    pub(in crate::sentry) fn set_mode(&mut self, node: Node, mode: u32) -> SyscallResult<()> {
        let now = crate::sentry::kernel::time::now();
        if let Some(mut list) = self.access_list(node, ACCESS)? {
            list.set_mode(mode);
            // It has the same length, so that nothing is refused.
            self.tree.set_attribute(node, ACCESS, Some(&list.to_bytes()), now)?;
        }
        Ok(self.tree.set_mode(node, mode, now)?)
    }

    /// The mode and lists of something new in a directory. The current process's mask applies
    /// unless the directory has a default list.
    pub(in crate::sentry) fn inheritance(
        &self,
        directory: Node,
        mode: u32,
        is_directory: bool,
    ) -> SyscallResult<Inheritance> {
        let Some(default) = self.access_list(directory, DEFAULT)? else {
            let mode = mode & !self.current().umask;
            return Ok(Inheritance { mode, access: None, default: None });
        };
        let mut access = default.clone();
        let mode = mode & (access.mode() | !0o777);
        access.set_mode(mode);
        let access = (!access.is_minimal()).then(|| access.to_bytes());
        Ok(Inheritance { mode, access, default: is_directory.then(|| default.to_bytes()) })
    }

    /// Gives something new the lists that it inherits.
    pub(in crate::sentry) fn set_inherited(
        &mut self,
        node: Node,
        inherited: &Inheritance,
    ) -> SyscallResult<()> {
        let now = crate::sentry::kernel::time::now();
        for (name, value) in [(ACCESS, &inherited.access), (DEFAULT, &inherited.default)] {
            if let Some(value) = value {
                self.tree.set_attribute(node, name, Some(value), now)?;
            }
        }
        Ok(())
    }

    /// Gives something new to the current process's user, unless that is the guest's.
    pub(in crate::sentry) fn own_new(&mut self, node: Node) -> SyscallResult<()> {
        if self.namespaces.users.is_first(self.processes.current_id()) {
            return Ok(());
        }
        let ids = self.ids();
        let owner = [ids.user[FOR_FILES], ids.group[FOR_FILES]];
        let owner = (owner != self.namespaces.users.owner).then_some(owner);
        Ok(self.tree.set_owner(node, owner, crate::sentry::kernel::time::now())?)
    }

    /// Creates an object at a path with the lists that it inherits.
    pub(in crate::sentry) fn create_at(
        &mut self,
        place: &ResolvedName,
        new: New<'_>,
        mode: u32,
    ) -> SyscallResult<Node> {
        let now = crate::sentry::kernel::time::now();
        if matches!(new, New::Link(_)) {
            let node = self.tree.create_at(place, new, mode, now)?;
            self.own_new(node)?;
            return Ok(node);
        }
        let is_directory = new == New::Directory;
        let inherited = self.inheritance(place.directory, mode, is_directory)?;
        let node = self.tree.create_at(place, new, inherited.mode, now)?;
        let set = self.own_new(node).and_then(|()| self.set_inherited(node, &inherited));
        if let Err(error) = set {
            // Without room for its lists it is not made.
            let mut made = place.clone();
            made.found = Some((node, self.tree.stat(node)?.kind));
            match is_directory {
                true => self.tree.remove_directory_at(&made, now)?,
                false => self.tree.remove_file_at(&made, now)?,
            }
            return Err(error);
        }
        Ok(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let entries = entries.iter().map(|&(tag, bits, id)| Entry { tag, bits, id });
        AccessList(entries.collect()).to_bytes()
    }

    const FULL: [(u16, u16, u32); 6] = [
        (OWNER, 6, NO_ID),
        (USER, 4, 1000),
        (OWNING_GROUP, 4, NO_ID),
        (GROUP, 6, 1000),
        (MASK, 7, NO_ID),
        (OTHER, 1, NO_ID),
    ];

    #[test]
    fn a_list_is_read_and_written_and_has_a_mode() {
        let bytes = value(&FULL);
        let mut list = AccessList::parse(&bytes).unwrap().unwrap();
        assert_eq!((list.to_bytes(), list.mode()), (bytes, 0o671));
        list.set_mode(0o415);
        // The mask stands for the group.
        assert_eq!(list.0[2].bits, 4);
        assert_eq!((list.mode(), list.0[4].bits), (0o415, 1));
        let minimal = AccessList::parse(&value(&[FULL[0], FULL[2], FULL[5]])).unwrap().unwrap();
        assert!(minimal.is_minimal() && !list.is_minimal());
        assert_eq!(AccessList::parse(b""), Ok(None));
        assert_eq!(AccessList::parse(&VERSION.to_le_bytes()), Ok(None));
    }

    #[test]
    fn lists_that_are_out_of_order_or_incomplete_are_refused() {
        let changed = |at: usize, entry| {
            let mut list = FULL;
            list[at] = entry;
            value(&list)
        };
        let mut reversed = FULL;
        reversed.reverse();
        for bad in [
            value(&FULL[..5]),
            value(&FULL[1..]),
            value(&reversed),
            value(&[&FULL[..1], &FULL].concat()),
            changed(1, (USER, 8, 1000)),
            changed(1, (USER, 4, NO_ID)),
            changed(1, (3, 4, 1000)),
            changed(4, (GROUP, 4, 1000)),
            value(&FULL)[..20].to_vec()[..19].to_vec(),
            vec![2],
        ] {
            assert_eq!(AccessList::parse(&bad), Err(Errno::INVAL), "{bad:?}");
        }
        let mut other = value(&FULL);
        other[0] = 1;
        assert_eq!(AccessList::parse(&other), Err(Errno::OPNOTSUPP));
    }
}

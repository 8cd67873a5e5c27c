//! Events of watched files.

use std::sync::Arc;

use afresh_files::{Kind, Node, ResolvedName};

use super::{Inotify, MAX_INSTANCES, WATCHES};
use crate::sentry::kernel::async_files::{
    DN_ACCESS, DN_ATTRIB, DN_CREATE, DN_DELETE, DN_MODIFY, DN_RENAME,
};
use crate::sentry::kernel::fd_table::Description;
use crate::sentry::kernel::state::Kernel;

/// The event of a directory (`DN_…`) that a change of a file in it is.
fn directory_event(mask: u32) -> u32 {
    let events =
        [(libc::IN_ACCESS, DN_ACCESS), (libc::IN_MODIFY, DN_MODIFY), (libc::IN_ATTRIB, DN_ATTRIB)];
    events.iter().filter(|(of, _)| mask & of != 0).fold(0, |all, (_, event)| all | event)
}

impl Kernel {
    /// Notifies all watchers.
    fn for_each(&mut self, each: impl FnMut(&mut Inotify)) {
        self.table.for_each_watching(each);
    }

    /// Whether changes of files are reported to a descriptor.
    pub(in crate::sentry) fn is_watched(&self) -> bool {
        self.watchers > 0 || self.table.async_files.has_noticed()
    }

    fn kind_bit(&self, node: Node) -> u32 {
        let kind = self.tree.stat(node).map(|stat| stat.kind);
        if kind == Ok(Kind::Directory) { libc::IN_ISDIR } else { 0 }
    }

    /// An event on a file, for watchers of it and of its directory.
    pub(in crate::sentry) fn notify_file(&mut self, node: Node, mask: u32) {
        self.notify_found(node, None, mask);
    }

    /// As [`Kernel::notify_file`]; by this name, if it has had several.
    pub(in crate::sentry) fn notify_found(
        &mut self,
        node: Node,
        found: Option<&(Node, Arc<[u8]>)>,
        mask: u32,
    ) {
        if !self.is_watched() {
            return;
        }
        let mask = mask | self.kind_bit(node);
        let known = self.tree.name(node);
        // A file without names is still one of the directory where it was opened.
        let removed = known.is_none() && self.tree.stat(node).is_ok_and(|stat| stat.links == 0);
        let found =
            found.filter(|(above, name)| removed || self.tree.lookup(*above, name) == Ok(node));
        let name = known.or_else(|| found.cloned());
        for directory in name.iter().map(|(above, _)| *above).chain([node]) {
            self.notice_directory(directory, directory_event(mask));
        }
        self.for_each(|watches| {
            if let Some((above, name)) = &name
                && !(removed && watches.excludes_removed(*above))
            {
                watches.happened(*above, mask, 0, name);
            }
            watches.happened(node, mask, 0, b"");
        });
    }

    /// A name was made.
    pub(in crate::sentry) fn notify_created(&mut self, place: &ResolvedName) {
        if !self.is_watched() {
            return;
        }
        let Ok(node) = self.tree.lookup(place.directory, &place.name) else { return };
        self.notice_directory(place.directory, DN_CREATE);
        let mask = libc::IN_CREATE | self.kind_bit(node);
        self.for_each(|watches| watches.happened(place.directory, mask, 0, &place.name));
    }

    /// A name was removed, which was a directory's or not.
    pub(in crate::sentry) fn notify_removed(&mut self, place: &ResolvedName) {
        let (Some((node, kind)), true) = (place.found, self.is_watched()) else { return };
        self.notice_directory(place.directory, DN_DELETE);
        let bit = if kind == Kind::Directory { libc::IN_ISDIR } else { 0 };
        self.notify_unnamed(node, kind, |watches| {
            watches.happened(place.directory, libc::IN_DELETE | bit, 0, &place.name);
        });
    }

    /// A file has lost a name, which `then` reports. A file without names has no watches.
    fn notify_unnamed(&mut self, node: Node, kind: Kind, then: impl Fn(&mut Inotify)) {
        let is_directory = kind == Kind::Directory;
        let gone = is_directory || self.tree.stat(node).map_or(0, |stat| stat.links) == 0;
        self.for_each(|watches| {
            if !is_directory {
                watches.happened(node, libc::IN_ATTRIB, 0, b"");
            }
            if gone {
                watches.happened(node, libc::IN_DELETE_SELF, 0, b"");
                watches.drop_watch(node);
            }
            then(watches);
        });
    }

    /// A name was given away: for another, or in exchange.
    pub(in crate::sentry) fn notify_moved(
        &mut self,
        from: &ResolvedName,
        to: &ResolvedName,
        exchanged: bool,
    ) {
        if !self.is_watched() {
            return;
        }
        let ways = [(from, to), (to, from)];
        for (from, to) in ways.into_iter().take(1 + usize::from(exchanged)) {
            let Some((node, kind)) = from.found else { continue };
            if to.found.is_some_and(|(there, _)| there == node) {
                return;
            }
            let bit = if kind == Kind::Directory { libc::IN_ISDIR } else { 0 };
            self.moves = self.moves % (u32::MAX - 1) + 1;
            let cookie = self.moves;
            self.notice_directory(from.directory, DN_DELETE);
            self.notice_directory(to.directory, DN_CREATE);
            if from.directory == to.directory {
                self.notice_directory(from.directory, DN_RENAME);
            }
            self.for_each(|watches| {
                watches.happened(from.directory, libc::IN_MOVED_FROM | bit, cookie, &from.name);
                watches.happened(to.directory, libc::IN_MOVED_TO | bit, cookie, &to.name);
                watches.happened(node, libc::IN_MOVE_SELF, 0, b"");
            });
        }
        if let Some((node, kind)) = to.found.filter(|_| !exchanged) {
            self.notify_unnamed(node, kind, |_| ());
        }
    }

    /// A description is opened, or its last reference is closed.
    pub(in crate::sentry) fn notify_open(&mut self, description: &Description, opened: bool) {
        let only_named = description.flags & libc::O_PATH as u32 != 0;
        let (Some(open), 1.., false) = (description.open.file(), self.watchers, only_named) else {
            return;
        };
        let (node, writes) = (open.node, open.access.write);
        self.notify_found(
            node,
            description.found.as_ref(),
            match (opened, writes) {
                (true, _) => libc::IN_OPEN,
                (false, true) => libc::IN_CLOSE_WRITE,
                (false, false) => libc::IN_CLOSE_NOWRITE,
            },
        );
    }

    /// Counts the watching descriptors from their descriptions.
    pub(in crate::sentry) fn count_watchers(&mut self) {
        self.watchers = self.table.watching().count() as u32;
    }

    /// Watches of all descriptors.
    pub(in crate::sentry) fn all_watches(&self) -> usize {
        self.table.watching().map(|watches| watches.list.len()).sum()
    }

    /// Whether there are no more watches and descriptors of them than a guest may have.
    pub(in crate::sentry) fn are_watches_bounded(&self) -> bool {
        let descriptors = self.table.watching().count();
        descriptors <= MAX_INSTANCES as usize && self.all_watches() <= WATCHES
    }
}

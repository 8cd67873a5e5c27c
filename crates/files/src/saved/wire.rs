//! A tree as bytes, and back: its changes over its layers, and the identities of those.
//!
//! Promises: equal trees give equal bytes; bytes from elsewhere are checked before they become a
//! tree (every name leads to an existing file, every file but held ones has a name, directories
//! form a tree, lengths fit), so that later code need not check. May break it: a layer with other
//! bytes than its digest; for host directories only the paths are kept.

use std::collections::{BTreeMap, BTreeSet};
#[cfg(unix)]
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::host::{HOST, HostDirectory};
use crate::layers::stack::Part;
use crate::nodes::attributes::Attributes;
use crate::nodes::content::{Content, LowerContent, PAGE, cost as page_cost};
use crate::nodes::inode::{Body, Directory, Entry, Inode};
use crate::nodes::map::Map;
use crate::nodes::name::{Name, PATH, check_name};
use crate::nodes::node::Node;
use crate::nodes::source::Source;
use crate::saved::description::{
    FORM, FORM_WITH_ATTRIBUTES, FORM_WITH_NUMBERS, FORM_WITH_OWNERS, SavedAttributes, SavedBody,
    SavedDescription, SavedNode, SavedNumbers, SavedOwners, SavedSource, SavedTree, TreeError,
    damaged,
};
use crate::saved::footprint;
use crate::trees::held_file::FileHold;
use crate::trees::tree::{Budget, Tree};

impl Part {
    /// The identity of a layer.
    pub(crate) fn identity(&self) -> Result<String, TreeError> {
        match self {
            Self::Host(_) => Ok("a host directory".to_owned()),
            Self::Archive(archive) => {
                let identity = archive.identity().map_err(|e| Refused::Layer(e.to_string()))?;
                Ok(identity.to_owned())
            }
        }
    }
}

impl Tree {
    fn identities(&self) -> Result<Vec<String>, TreeError> {
        self.lower.layers.parts.iter().map(Part::identity).collect()
    }

    /// The entries of a directory in the layers.
    fn below(&self, node: Node) -> Map<Name, Entry> {
        let inode = match self.lower.nodes.get(&node) {
            Some(inode) => Some(inode.clone()),
            None => self.lower.layers.inode(node).ok(),
        };
        match inode.as_deref() {
            Some(Inode { body: Body::Directory(directory), .. }) => directory.entries.clone(),
            _ => Map::default(),
        }
    }

    /// The tree as bytes. It can be put over the same layers again, in any process, by
    /// [`Tree::restored`].
    ///
    /// # Errors
    /// [`TreeError::Layer`] if a layer cannot be read for its digest; [`TreeError::Exceeded`].
    pub fn saved(&self) -> Result<SavedTree, TreeError> {
        let mut pages = Vec::new();
        let (mut nodes, mut gone, mut hosts) = (Vec::new(), Vec::new(), BTreeSet::new());
        let (mut attributes, mut owners) = (SavedAttributes::new(), SavedOwners::new());
        for (node, _, now) in self.lower.nodes.differing(&self.nodes, Arc::ptr_eq) {
            match now {
                None => gone.push(node.0),
                Some(inode) => {
                    let list = inode.attributes.iter();
                    let list: Vec<_> = list.map(|(n, v)| (n.to_vec(), v.to_vec())).collect();
                    attributes.extend((!list.is_empty()).then_some((node.0, list)));
                    owners.extend(inode.owner.map(|owner| (node.0, owner)));
                    nodes.push((node.0, self.saved_node(*node, inode, &mut pages, &mut hosts)));
                }
            }
        }
        hosts.extend(self.held.iter().map(|(node, _)| *node));
        let path = |node: &Node| {
            let path = self.lower.layers.path(*node)?;
            Some((node.0, path.as_os_str().as_encoded_bytes().to_vec()))
        };
        let layers = &self.lower.layers;
        let numbers = hosts.iter();
        let numbers = numbers.filter_map(|node| Some((node.0, layers.lasting_number(*node)?)));
        let numbers: SavedNumbers = numbers.collect();
        let has_numbers = layers.hosts().any(|host| !host.is_numbered_by_path());
        let form = match has_numbers {
            _ if !owners.is_empty() => FORM_WITH_OWNERS,
            true => FORM_WITH_NUMBERS,
            false if attributes.is_empty() => FORM,
            false => FORM_WITH_ATTRIBUTES,
        };
        let saved = SavedDescription {
            form,
            budget: (self.budget.bytes, self.budget.files),
            next: self.next,
            layers: self.identities()?,
            hosts: hosts.iter().filter_map(path).collect(),
            nodes,
            gone,
            held: self.held.iter().map(|(node, held)| (node.0, held.count)).collect(),
            pages: pages.len() as u64,
        };
        let written = |error: postcard::Error| damaged(error.to_string());
        let mut description = postcard::to_allocvec(&saved).map_err(written)?;
        if form != FORM {
            description = postcard::to_extend(&attributes, description).map_err(written)?;
        }
        if form == FORM_WITH_NUMBERS {
            description = postcard::to_extend(&numbers, description).map_err(written)?;
        }
        if form == FORM_WITH_OWNERS {
            let last = (has_numbers.then_some(numbers), owners);
            description = postcard::to_extend(&last, description).map_err(written)?;
        }
        // Readers refuse more.
        footprint::charge_tree(&description, self.budget.files)?;
        Ok(SavedTree { description, pages })
    }

    pub(crate) fn saved_node(
        &self,
        node: Node,
        inode: &Inode,
        pages: &mut Vec<Arc<Vec<u8>>>,
        hosts: &mut BTreeSet<Node>,
    ) -> SavedNode {
        hosts.insert(node);
        let body = match &inode.body {
            Body::File(content) => {
                let own = content.pages.iter();
                let own = own.map(|(number, page)| {
                    pages.push(page.clone());
                    (*number, page.len() as u32)
                });
                let own = own.collect();
                let under = content.under.as_ref().map(|under| match under.source {
                    Source::Host(node) => {
                        hosts.insert(node);
                        (SavedSource::Host(node.0), under.len)
                    }
                    Source::Archive { layer, file } => {
                        (SavedSource::Archive(layer, file), under.len)
                    }
                });
                SavedBody::File { size: content.size, pages: own, under }
            }
            Body::Directory(directory) => {
                hosts.insert(directory.parent);
                let below = self.below(node);
                let differing = below.differing(&directory.entries, |a, b| a == b);
                let entries = differing.into_iter().map(|(name, _, entry)| {
                    hosts.extend(entry.map(|entry| entry.node));
                    let entry = entry.map(|entry| (entry.node.0, entry.kind, entry.paid));
                    (name.0.to_vec(), entry)
                });
                SavedBody::Directory { parent: directory.parent.0, entries: entries.collect() }
            }
            Body::Link(target) => SavedBody::Link(target.to_vec()),
            Body::Device(number) => SavedBody::Device(*number),
        };
        SavedNode { mode: inode.mode, times: inode.times, paid: inode.paid, body }
    }

    /// A tree out of bytes that [`Tree::saved`] gave, over the layers of this one, which must be
    /// the same. Bytes from strangers are checked. Relatives share the inode numbers of host files:
    /// open the layers anew for a tree of an earlier form, in which they follow from the paths.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn restored(&self, saved: &SavedTree) -> Result<Self, TreeError> {
        let _charge = footprint::charge_tree(&saved.description, self.budget.files)?;
        let (description, rest): (SavedDescription, _) =
            postcard::take_from_bytes(&saved.description).map_err(|e| damaged(e.to_string()))?;
        let (attributes, rest): (SavedAttributes, _) = match description.form {
            FORM => (Vec::new(), rest),
            FORM_WITH_ATTRIBUTES | FORM_WITH_NUMBERS | FORM_WITH_OWNERS => {
                postcard::take_from_bytes(rest).map_err(|e| damaged(e.to_string()))?
            }
            form => {
                let known = format!("{FORM} to {FORM_WITH_OWNERS} are known");
                return Err(damaged(format!("its form is {form}, and {known}")));
            }
        };
        let mut owners = SavedOwners::new();
        let (numbers, rest): (Option<SavedNumbers>, _) = match description.form {
            FORM_WITH_NUMBERS => {
                let (numbers, rest) =
                    postcard::take_from_bytes(rest).map_err(|e| damaged(e.to_string()))?;
                (Some(numbers), rest)
            }
            FORM_WITH_OWNERS => {
                let (found, rest): ((_, SavedOwners), _) =
                    postcard::take_from_bytes(rest).map_err(|e| damaged(e.to_string()))?;
                owners = found.1;
                (found.0, rest)
            }
            _ => (None, rest),
        };
        if !rest.is_empty() {
            return Err(damaged("there are bytes after its end"));
        }
        let found = self.identities()?;
        if found != description.layers {
            let say = |layers: &[String]| match layers {
                [] => "no layers".to_owned(),
                layers => layers.join(", "),
            };
            return Err(TreeError::Layers {
                expected: say(&description.layers),
                found: say(&found),
            });
        }
        let attributes = checked_attributes(attributes)?;
        let (tree, pages) = (self.blank(), saved.pages.iter());
        let owners = checked_owners(owners)?;
        Loader { base: self, tree, pages, attributes, numbers, owners }.load(description)
    }

    /// Whether it is over layers.
    #[must_use]
    pub fn has_layers(&self) -> bool {
        !self.lower.layers.parts.is_empty()
    }

    /// Whether it is over layers [without a name](crate::Layer::known_as).
    #[must_use]
    pub fn has_unknown_layers(&self) -> bool {
        let known =
            |part: &Part| matches!(part, Part::Archive(archive) if archive.known_as.is_some());
        !self.lower.layers.parts.iter().all(known)
    }

    /// The layers alone.
    pub(crate) fn blank(&self) -> Self {
        Self {
            nodes: self.lower.nodes.clone(),
            held: Map::default(),
            next: self.lower.next,
            bytes: 0,
            files: 0,
            budget: self.budget,
            lower: self.lower.clone(),
        }
    }
}

/// Builds a tree from saved data, over the layers of another.
pub(crate) struct Loader<'a> {
    pub(crate) base: &'a Tree,
    pub(crate) tree: Tree,
    pub(crate) pages: std::slice::Iter<'a, Arc<Vec<u8>>>,
    /// Extended attributes of files that have not been built yet.
    pub(crate) attributes: BTreeMap<Node, Attributes>,
    /// Inode numbers of host files; `None` if they follow from the paths.
    pub(crate) numbers: Option<SavedNumbers>,
    /// Recorded owners of files that have not been built yet.
    pub(crate) owners: BTreeMap<Node, [u32; 2]>,
}

/// Extended attributes by file; those of a stranger are checked.
fn checked_attributes(saved: SavedAttributes) -> Result<BTreeMap<Node, Attributes>, TreeError> {
    let mut all = BTreeMap::new();
    for (number, list) in saved {
        let list = Attributes::checked(list);
        let list = list.ok_or_else(|| damaged("extended attributes that no file can have"))?;
        if all.insert(Node(number), list).is_some() {
            return Err(damaged("a file has two lists of extended attributes"));
        }
    }
    Ok(all)
}

/// Recorded owners by file; those of a stranger are checked.
fn checked_owners(saved: SavedOwners) -> Result<BTreeMap<Node, [u32; 2]>, TreeError> {
    let is_sorted = saved.is_sorted_by(|(one, _), (two, _)| one < two);
    if !is_sorted || saved.iter().any(|(_, owner)| owner.contains(&u32::MAX)) {
        return Err(damaged("owners are out of order, or have no number"));
    }
    Ok(saved.into_iter().map(|(node, owner)| (Node(node), owner)).collect())
}

impl Loader<'_> {
    pub(crate) fn load(mut self, saved: SavedDescription) -> Result<Tree, TreeError> {
        if saved.pages != self.pages.len() as u64 {
            return Err(damaged("it has another number of pages than stated"));
        }
        if saved.next < self.base.lower.next || saved.next >= HOST {
            return Err(damaged("its numbers are used up"));
        }
        self.tree.next = saved.next;
        self.tree.budget = Budget { bytes: saved.budget.0, files: saved.budget.1 };
        let layers = &self.base.lower.layers;
        for (number, path) in saved.hosts {
            #[cfg(unix)]
            let path = Path::new(std::ffi::OsStr::from_bytes(&path));
            #[cfg(windows)]
            let path = String::from_utf8_lossy(&path).into_owned();
            #[cfg(windows)]
            let path = Path::new(&path);
            layers.enter(Node(number), path).map_err(|_| {
                damaged(format!("{} is not in the host directory any more", path.display()))
            })?;
        }
        self.restore_numbers()?;
        for number in saved.gone {
            if number == Tree::ROOT.0 || self.tree.nodes.remove(&Node(number)).is_none() {
                return Err(damaged("a removed file never existed"));
            }
        }
        let mut last = None;
        for (number, node) in saved.nodes {
            if last >= Some(number) || number == 0 {
                return Err(damaged("its files are out of order"));
            }
            last = Some(number);
            // A tree over captured layers keeps the numbers of the host directories.
            if number >= saved.next && number & HOST == 0 {
                return Err(damaged("a file has a number that was never given out"));
            }
            let inode = self.node(Node(number), node)?;
            self.tree.nodes.insert(Node(number), Arc::new(inode));
        }
        if !self.attributes.is_empty() {
            return Err(damaged("extended attributes are of no file"));
        }
        if !self.owners.is_empty() {
            return Err(damaged("an owner is of no file"));
        }
        let mut tree = self.tree;
        for (number, count) in saved.held {
            let held = FileHold { count, file: None };
            if count == 0 || tree.held.insert(Node(number), held).is_some() {
                return Err(damaged("a file is held twice"));
            }
            tree.inode(Node(number)).map_err(|_| damaged("a held file does not exist"))?;
        }
        tree.check()?;
        Ok(tree)
    }

    /// Gives host files the inode numbers that they had.
    fn restore_numbers(&mut self) -> Result<(), TreeError> {
        let layers = &self.base.lower.layers;
        let Some(numbers) = self.numbers.take() else {
            layers.hosts().for_each(HostDirectory::number_by_path);
            return Ok(());
        };
        if !numbers.is_sorted_by(|(one, _), (two, _)| one < two) {
            return Err(damaged("its inode numbers are out of order"));
        }
        for (node, number) in numbers {
            layers.restore_number(Node(node), number).map_err(|_| {
                damaged("an inode number of an unknown file, or one that no host file can have")
            })?;
        }
        Ok(())
    }

    fn node(&mut self, node: Node, saved: SavedNode) -> Result<Inode, TreeError> {
        let body = match saved.body {
            SavedBody::File { size, pages, under } => self.file(size, pages, under)?,
            SavedBody::Directory { parent, entries } => {
                let mut inside = Directory { entries: self.base.below(node), parent: Node(parent) };
                for (name, entry) in entries {
                    check_name(&name).map_err(|_| damaged("a name is invalid"))?;
                    match entry {
                        None => drop(inside.entries.remove(&name[..])),
                        Some((node, kind, paid)) => {
                            let entry = Entry { node: Node(node), kind, paid };
                            inside.entries.insert(Name::from(&name[..]), entry);
                        }
                    }
                }
                Body::Directory(inside)
            }
            SavedBody::Link(target) if target.is_empty() || target.len() >= PATH => {
                return Err(damaged("the target of a link is empty or too long"));
            }
            SavedBody::Link(target) => Body::Link(target.into()),
            SavedBody::Device(number) => Body::Device(number),
        };
        let times = [saved.times.accessed, saved.times.modified, saved.times.changed];
        if saved.mode > 0o7777 || times.iter().any(|time| time.nanos >= 1_000_000_000) {
            return Err(damaged("a mode or a time is invalid"));
        }
        let (mode, times, paid) = (saved.mode, saved.times, saved.paid);
        // Link counts and the name follow from the directories, which are checked after all nodes.
        let attributes = self.attributes.remove(&node).unwrap_or_default();
        if attributes != Attributes::default() && !paid {
            return Err(damaged("a file that was not paid for has extended attributes"));
        }
        let owner = self.owners.remove(&node);
        if owner.is_some() && !paid {
            return Err(damaged("a file that was not paid for has an owner"));
        }
        Ok(Inode { body, mode, links: 0, times, paid, name: None, attributes, owner })
    }

    fn file(
        &mut self,
        size: u64,
        pages: Vec<(u64, u32)>,
        under: Option<(SavedSource, u64)>,
    ) -> Result<Body, TreeError> {
        let mut content = Content::default();
        content.set_size(size)?;
        let mut last = None;
        for (number, len) in pages {
            let page = self.pages.next().ok_or_else(|| damaged("a page is missing"))?;
            let end = number.checked_mul(PAGE as u64).and_then(|at| at.checked_add(u64::from(len)));
            if last >= Some(number)
                || len as usize > PAGE
                || page.len() < len as usize
                || end.is_none_or(|end| end > size)
            {
                return Err(damaged("a page is outside of its file"));
            }
            last = Some(number);
            let page = match page.len() == len as usize {
                true => page.clone(),
                false => Arc::new(page[..len as usize].to_vec()),
            };
            content.paid += page_cost(page.len());
            content.pages.insert(number, page);
        }
        if let Some((source, len)) = under {
            let source = match source {
                SavedSource::Host(node) => Source::Host(Node(node)),
                SavedSource::Archive(layer, file) => Source::Archive { layer, file },
            };
            let most = self.base.lower.layers.len(source).map_err(|_| damaged("no such layer"))?;
            if len > most || len > size {
                return Err(damaged("a file has more of a layer than there is"));
            }
            content.under = Some(LowerContent { source, len, version: None });
        }
        Ok(Body::File(content))
    }
}

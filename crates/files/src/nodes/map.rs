//! A sorted map that is copied in no time: a B-tree whose copies share every node that neither has
//! changed.
//!
//! Promises: a clone costs one reference count, a change copies the nodes on the way to it and no
//! others, and comparing two relatives looks only at nodes that they do not share. May break it:
//! nothing in safe code.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::sync::Arc;

/// Entries of a node, at most.
const WIDTH: usize = 32;

#[derive(Debug)]
enum Node<K, V> {
    Leaf(Vec<(K, V)>),
    /// No key below a child is less than the child's own.
    Branch(Vec<(K, Arc<Node<K, V>>)>),
}

impl<K: Clone, V: Clone> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::Leaf(entries) => Self::Leaf(entries.clone()),
            Self::Branch(children) => Self::Branch(children.clone()),
        }
    }
}

/// The sorted map.
#[derive(Debug)]
pub(crate) struct Map<K, V> {
    root: Option<Arc<Node<K, V>>>,
    len: usize,
}

impl<K, V> Clone for Map<K, V> {
    fn clone(&self) -> Self {
        Self { root: self.root.clone(), len: self.len }
    }
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self { root: None, len: 0 }
    }
}

/// The child that `key` belongs below.
fn child<K, T, Q: Ord + ?Sized>(children: &[(K, T)], key: &Q) -> usize
where
    K: Borrow<Q>,
{
    children.partition_point(|(first, _)| first.borrow() <= key).saturating_sub(1)
}

fn find<K, V, Q: Ord + ?Sized>(entries: &[(K, V)], key: &Q) -> Result<usize, usize>
where
    K: Borrow<Q>,
{
    entries.binary_search_by(|(other, _)| other.borrow().cmp(key))
}

impl<K: Ord + Clone, V: Clone> Map<K, V> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let mut node = self.root.as_deref()?;
        loop {
            match node {
                Node::Branch(children) => node = &children[child(children, key)].1,
                Node::Leaf(entries) => return find(entries, key).ok().map(|at| &entries[at].1),
            }
        }
    }

    /// The value, on nodes that are not shared.
    pub(crate) fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        // A missing key copies nothing.
        self.get(key)?;
        let mut node = Arc::make_mut(self.root.as_mut()?);
        loop {
            match node {
                Node::Branch(children) => {
                    let at = child(children, key);
                    node = Arc::make_mut(&mut children[at].1);
                }
                Node::Leaf(entries) => return find(entries, key).ok().map(|at| &mut entries[at].1),
            }
        }
    }

    /// Puts a value in, and gives the one that was there.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let Some(root) = &mut self.root else {
            self.root = Some(Arc::new(Node::Leaf(vec![(key, value)])));
            self.len = 1;
            return None;
        };
        let (old, split) = Arc::make_mut(root).insert(key, value);
        if let Some((key, right)) = split {
            let left = root.clone();
            let first = left.first().clone();
            *root = Arc::new(Node::Branch(vec![(first, left), (key, Arc::new(right))]));
        }
        self.len += usize::from(old.is_none());
        old
    }

    /// Takes a value out.
    pub(crate) fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        let root = self.root.as_mut()?;
        let value = Arc::make_mut(root).remove(key)?;
        self.len -= 1;
        loop {
            match &**root {
                Node::Branch(children) if children.len() == 1 => *root = children[0].1.clone(),
                _ => break,
            }
        }
        if self.len == 0 {
            self.root = None;
        }
        Some(value)
    }

    /// A map of entries that are in order, each key once.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "for host directories"))]
    pub(crate) fn of_sorted(entries: Vec<(K, V)>) -> Self {
        debug_assert!(entries.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let len = entries.len();
        let filled = |node: Node<K, V>| (node.first().clone(), Arc::new(node));
        let mut level: Vec<_> = chunks(entries).map(|leaf| filled(Node::Leaf(leaf))).collect();
        while level.len() > 1 {
            level = chunks(level).map(|branch| filled(Node::Branch(branch))).collect();
        }
        Self { root: level.pop().map(|(_, root)| root), len }
    }

    pub(crate) fn iter(&self) -> Walk<'_, K, V> {
        Walk { stack: self.root.as_deref().map(Part::Node).into_iter().collect() }
    }

    /// Entries from `key` on.
    pub(crate) fn from<'a, Q: Ord + ?Sized>(&'a self, key: &Q) -> Walk<'a, K, V>
    where
        K: Borrow<Q>,
    {
        let mut stack = Vec::new();
        let mut node = self.root.as_deref();
        while let Some(at) = node {
            match at {
                Node::Branch(children) => {
                    let below = child(children, key);
                    stack.extend(children[below + 1..].iter().rev().map(|(_, c)| Part::Node(c)));
                    node = Some(&children[below].1);
                }
                Node::Leaf(entries) => {
                    let (Ok(first) | Err(first)) = find(entries, key);
                    stack.extend(entries[first..].iter().rev().map(Part::Entry));
                    node = None;
                }
            }
        }
        Walk { stack }
    }

    /// Keys whose values differ, with both values. Shared nodes are skipped.
    pub(crate) fn differing<'a>(
        &'a self,
        other: &'a Self,
        mut same: impl FnMut(&V, &V) -> bool,
    ) -> Vec<(&'a K, Option<&'a V>, Option<&'a V>)> {
        let (mut one, mut two) = (self.iter(), other.iter());
        let mut found = Vec::new();
        loop {
            match (one.stack.last(), two.stack.last()) {
                (None, None) => return found,
                (Some(Part::Node(a)), Some(Part::Node(b))) => {
                    let shared = std::ptr::eq(*a, *b);
                    let order = a.height().cmp(&b.height());
                    if shared {
                        one.stack.pop();
                        two.stack.pop();
                    }
                    if !shared && order != Ordering::Less {
                        one.open();
                    }
                    if !shared && order != Ordering::Greater {
                        two.open();
                    }
                }
                (Some(Part::Node(_)), _) => one.open(),
                (_, Some(Part::Node(_))) => two.open(),
                (Some(Part::Entry(a)), Some(Part::Entry(b))) => match a.0.cmp(&b.0) {
                    Ordering::Less => {
                        found.push((&a.0, Some(&a.1), None));
                        one.stack.pop();
                    }
                    Ordering::Greater => {
                        found.push((&b.0, None, Some(&b.1)));
                        two.stack.pop();
                    }
                    Ordering::Equal => {
                        if !same(&a.1, &b.1) {
                            found.push((&a.0, Some(&a.1), Some(&b.1)));
                        }
                        one.stack.pop();
                        two.stack.pop();
                    }
                },
                (Some(Part::Entry(a)), None) => {
                    found.push((&a.0, Some(&a.1), None));
                    one.stack.pop();
                }
                (None, Some(Part::Entry(b))) => {
                    found.push((&b.0, None, Some(&b.1)));
                    two.stack.pop();
                }
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> Node<K, V> {
    fn first(&self) -> &K {
        match self {
            Self::Leaf(entries) => &entries[0].0,
            Self::Branch(children) => &children[0].0,
        }
    }

    fn height(&self) -> usize {
        match self {
            Self::Leaf(_) => 0,
            Self::Branch(children) => 1 + children[0].1.height(),
        }
    }

    /// The previous value, and the right half with its first key when the node was full.
    #[allow(clippy::type_complexity, reason = "said in the line above")]
    fn insert(&mut self, key: K, value: V) -> (Option<V>, Option<(K, Self)>) {
        match self {
            Self::Leaf(entries) => match find(entries, &key) {
                Ok(at) => (Some(std::mem::replace(&mut entries[at].1, value)), None),
                Err(at) => {
                    entries.insert(at, (key, value));
                    (None, halve(entries).map(|right| (right[0].0.clone(), Self::Leaf(right))))
                }
            },
            Self::Branch(children) => {
                let at = child(children, &key);
                if key < children[at].0 {
                    children[at].0 = key.clone();
                }
                let (old, split) = Arc::make_mut(&mut children[at].1).insert(key, value);
                let right = split.and_then(|(key, right)| {
                    children.insert(at + 1, (key, Arc::new(right)));
                    halve(children)
                });
                (old, right.map(|right| (right[0].0.clone(), Self::Branch(right))))
            }
        }
    }

    fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::Leaf(entries) => find(entries, key).ok().map(|at| entries.remove(at).1),
            Self::Branch(children) => {
                let at = child(children, key);
                let value = Arc::make_mut(&mut children[at].1).remove(key);
                if children[at].1.is_hollow() {
                    children.remove(at);
                }
                value
            }
        }
    }

    fn is_hollow(&self) -> bool {
        match self {
            Self::Leaf(entries) => entries.is_empty(),
            Self::Branch(children) => children.is_empty(),
        }
    }
}

/// Groups entries into new nodes. Each node has room for later entries.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "for host directories"))]
fn chunks<T>(entries: Vec<T>) -> impl Iterator<Item = Vec<T>> {
    const FILLED: usize = WIDTH * 3 / 4;
    let mut entries = entries.into_iter();
    std::iter::from_fn(move || {
        let chunk: Vec<_> = entries.by_ref().take(FILLED).collect();
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// Cuts a full node in two. Entries in order, which is the common case, leave the left half well
/// filled.
fn halve<T>(entries: &mut Vec<T>) -> Option<Vec<T>> {
    (entries.len() > WIDTH).then(|| entries.split_off(WIDTH / 2))
}

enum Part<'a, K, V> {
    Node(&'a Node<K, V>),
    Entry(&'a (K, V)),
}

/// Goes through a map in order.
pub(crate) struct Walk<'a, K, V> {
    stack: Vec<Part<'a, K, V>>,
}

impl<K, V> Walk<'_, K, V> {
    /// Replaces the next node by its contents.
    fn open(&mut self) {
        match self.stack.pop() {
            Some(Part::Node(Node::Branch(children))) => {
                self.stack.extend(children.iter().rev().map(|(_, child)| Part::Node(&**child)));
            }
            Some(Part::Node(Node::Leaf(entries))) => {
                self.stack.extend(entries.iter().rev().map(Part::Entry));
            }
            Some(entry) => self.stack.push(entry),
            None => {}
        }
    }
}

impl<'a, K, V> Iterator for Walk<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.stack.last()? {
                Part::Node(_) => self.open(),
                Part::Entry(entry) => {
                    let entry = *entry;
                    self.stack.pop();
                    return Some((&entry.0, &entry.1));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_of_sorted_entries_is_as_one_that_they_were_put_into(
            model in prop::collection::btree_map(0u32..4000, any::<u16>(), 0..2000),
            later in prop::collection::vec((any::<bool>(), 0u32..4000), 0..100),
        ) {
            let mut map = Map::of_sorted(model.clone().into_iter().collect());
            let mut model = model;
            prop_assert_eq!(map.len(), model.len());
            prop_assert!(map.iter().eq(&model));
            for (puts, key) in later {
                match puts {
                    true => prop_assert_eq!(map.insert(key, 1), model.insert(key, 1)),
                    false => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                }
                prop_assert_eq!(map.get(&key), model.get(&key));
            }
            prop_assert!(map.iter().eq(&model));
        }

        #[test]
        fn it_is_the_same_as_a_plain_map_and_so_are_its_copies(
            steps in prop::collection::vec((0u8..8, 0u32..400, any::<u16>()), 1..600)
        ) {
            let (mut map, mut model) = (Map::default(), BTreeMap::new());
            let mut kept: Vec<(Map<u32, u16>, BTreeMap<u32, u16>)> = Vec::new();
            for (what, key, value) in steps {
                match what {
                    0..=3 => prop_assert_eq!(map.insert(key, value), model.insert(key, value)),
                    4 | 5 => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                    6 => {
                        if let Some(now) = map.get_mut(&key) {
                            *now = value;
                            model.insert(key, value);
                        }
                    }
                    _ => kept.push((map.clone(), model.clone())),
                }
                prop_assert_eq!(map.get(&key), model.get(&key));
                prop_assert_eq!(map.len(), model.len());
            }
            kept.push((map.clone(), model.clone()));
            for (copy, then) in &kept {
                prop_assert!(copy.iter().eq(then.iter()));
                prop_assert!(copy.from(&200).eq(then.range(200..)));
                let differing: Vec<u32> =
                    map.differing(copy, |a, b| a == b).iter().map(|(key, ..)| **key).collect();
                let expected: Vec<u32> = (0..400).filter(|k| model.get(k) != then.get(k)).collect();
                prop_assert_eq!(differing, expected);
            }
        }
    }

    #[test]
    fn comparing_relatives_looks_at_what_they_do_not_share() {
        let mut map: Map<u32, u32> = Map::default();
        for key in 0..100_000 {
            map.insert(key, 0);
        }
        let mut copy = map.clone();
        copy.insert(50_000, 1);
        copy.remove(&7);
        let mut looks = 0;
        let found = map.differing(&copy, |a, b| {
            looks += 1;
            a == b
        });
        assert_eq!(found.len(), 2);
        assert!(looks < 4 * WIDTH, "{looks}");
    }
}

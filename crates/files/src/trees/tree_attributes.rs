//! Calls on the extended attributes of files.

use std::sync::Arc;

use crate::error::Refused;
use crate::nodes::node::{Node, Time};
use crate::trees::tree::Tree;

impl Tree {
    /// The value of an extended attribute of a file; `None` if it has none of that name.
    ///
    /// # Errors
    /// As [`Tree::stat`].
    pub fn attribute(&self, node: Node, name: &[u8]) -> Result<Option<Arc<[u8]>>, Refused> {
        Ok(self.inode(node)?.attributes.get(name).cloned())
    }

    /// The names of the extended attributes of a file, in order.
    ///
    /// # Errors
    /// As [`Tree::stat`].
    pub fn attribute_names(&self, node: Node) -> Result<Vec<Arc<[u8]>>, Refused> {
        let inode = self.inode(node)?;
        Ok(inode.attributes.iter().map(|(name, _)| name.clone()).collect())
    }

    /// Sets an extended attribute of a file, or removes it if there is no value.
    ///
    /// # Errors
    /// [`Refused::Invalid`] for a name that is empty, has a zero or more than 255 bytes,
    /// [`Refused::TooLarge`] for a value of more than 64 KiB, [`Refused::Full`] where the budget is
    /// spent or the names of the file would have more than 64 KiB; as [`Tree::stat`].
    pub fn set_attribute(
        &mut self,
        node: Node,
        name: &[u8],
        value: Option<&[u8]>,
        now: Time,
    ) -> Result<(), Refused> {
        let (more, less) = self.inode(node)?.attributes.growth(name, value)?;
        // The attribute first: a file of a layer is not copied, and paid for, if there is no room.
        self.pay(more, 0)?;
        let inode = match self.copy_up(node, false) {
            Ok(inode) => inode,
            Err(refused) => {
                self.bytes -= more;
                return Err(refused);
            }
        };
        inode.attributes.set(name, value);
        inode.times.changed = now;
        self.bytes -= less;
        Ok(())
    }
}

//! The servers that a program may reach, and the authorities that it trusts for them.

use afresh_egress::{ConnectionLog, EgressPolicy, NetGrant};
use afresh_files::Tree;

use super::Program;
use crate::error::{Incompatible, WarmError};
use crate::trust;

impl Program {
    /// Allows TCP connections to a server outside. The default is none. Every reset, rollback and
    /// fork, and the end of the warm-up, closes connections. With a [`Rule`](crate::Rule), each
    /// HTTP request is checked. The guest's bundles of certificates have the rule's authority, and
    /// its environment names them.
    #[must_use]
    pub fn reach(mut self, grant: impl Into<NetGrant>) -> Self {
        self.reaches.push(grant.into());
        self
    }

    /// Logs connections to `log`, unless the caller of a run has another log.
    #[must_use]
    pub fn log_connections(mut self, log: ConnectionLog) -> Self {
        self.connections = Some(log);
        self
    }

    pub(super) fn egress(&self) -> EgressPolicy {
        let policy: EgressPolicy = self.reaches.iter().cloned().collect();
        policy.with_log(self.connections.clone())
    }

    /// Makes the guest's files trust the authorities of its rules.
    pub(super) fn write_trust(&self, tree: &mut Tree) -> Result<(), WarmError> {
        let written = trust::write(tree, &self.egress(), &self.env);
        written.map_err(|(path, error)| WarmError::File { path, error })
    }

    /// As [`Program::write_trust`], for a guest out of a snapshot.
    pub(crate) fn renew_trust(&self, tree: &mut Tree) -> Result<(), Incompatible> {
        let written = trust::write(tree, &self.egress(), &self.env);
        let why = "the authorities of its egress rules cannot be written there";
        written.map_err(|(path, _)| Incompatible::File { path, why })
    }
}

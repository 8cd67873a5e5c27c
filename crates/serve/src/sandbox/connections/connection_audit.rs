//! Connections of sandboxes to the outside, in the audit log.

use std::sync::Arc;

use afresh::linux::{ConnectionLog, ConnectionReceiver, ConnectionRecord};
use serde_json::{Map, Value, json};

use crate::audit::AuditLog;

/// Receives the records of one sandbox.
struct ConnectionAudit {
    audit: Arc<AuditLog>,
    tenant: Arc<str>,
    sandbox: String,
}

/// The log of the connections of one sandbox.
pub(crate) fn connection_log(
    audit: Option<&Arc<AuditLog>>,
    tenant: &Arc<str>,
    sandbox: &str,
) -> ConnectionLog {
    let Some(audit) = audit.cloned() else { return ConnectionLog::named(sandbox) };
    let (tenant, id) = (tenant.clone(), sandbox.to_owned());
    ConnectionLog::new(sandbox, Arc::new(ConnectionAudit { audit, tenant, sandbox: id }))
}

impl ConnectionReceiver for ConnectionAudit {
    fn record(&self, record: &ConnectionRecord) {
        let request = |part: fn(&(String, String)) -> &String| record.request.as_ref().map(part);
        let dropped = (record.dropped > 0).then_some(record.dropped);
        let fields = [
            ("event", json!("connection")),
            ("tenant", json!(&*self.tenant)),
            ("sandbox", json!(self.sandbox)),
            ("host", json!(record.host)),
            ("port", json!(record.port)),
            ("result", json!(record.outcome.as_str())),
            ("reason", json!(record.reason)),
            ("method", json!(request(|(method, _)| method))),
            ("path", json!(request(|(_, path)| path))),
            ("dropped", json!(dropped)),
        ];
        let fields = fields.map(|(name, value): (&str, Value)| (name.to_owned(), value));
        // A line that cannot be written is counted there.
        self.audit.write(Map::from_iter(fields));
    }
}

#[cfg(test)]
mod tests {
    use afresh::linux::Outcome;

    use super::*;
    use crate::audit::AuditConfig;

    #[tokio::test]
    async fn each_connection_is_a_line_with_its_tenant_and_sandbox() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let audit = Arc::new(AuditLog::open(&AuditConfig::new(&path)).unwrap());
        let log = connection_log(Some(&audit), &"acme".into(), "s1");
        let record = ConnectionRecord::new("api.test", 443, Outcome::Refused);
        log.record(record.reason("no rule allows it").request("PUT", "/v1"));
        audit.flush().await;
        let text = std::fs::read_to_string(path).unwrap();
        let mut line: Value = serde_json::from_str(text.trim()).unwrap();
        line.as_object_mut().unwrap().remove("time");
        let expected = json!({
            "event": "connection", "tenant": "acme", "sandbox": "s1", "host": "api.test", "port": 443,
            "result": "refused", "reason": "no rule allows it", "method": "PUT", "path": "/v1",
        });
        assert_eq!(line, expected);
    }
}

//! Passes: short-lived credentials with which a client other than the server, such as a gateway, reaches ports of
//! certain tasks on a host and nothing else.
//!
//! The server issues and signs passes. The host verifies them with the server's key and needs no other information.

use std::collections::{BTreeMap, BTreeSet};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use windlass_model::id::{InstanceId, SubmissionId};

/// Prevents the signature of a pass from being valid for anything else.
const SIGNED_PREFIX: &[u8] = b"windlass pass to ports 1\n";
/// Prefix of an encoded pass, which distinguishes it from other credentials.
const TOKEN_PREFIX: &str = "wlpass1";
const BYTES_MAX: usize = 64 * 1024;

/// Contents of a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortPass {
    pub instance: InstanceId,
    /// Tasks, with the reachable ports of each.
    pub tasks: BTreeMap<SubmissionId, BTreeSet<u16>>,
    /// Seconds since 1970.
    pub expires_at: i64,
}

impl PortPass {
    /// Encodes the pass, signed by `sign`.
    pub fn encode(&self, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> Result<String, serde_json::Error> {
        let body = serde_json::to_vec(self)?;
        let signature = sign(&[SIGNED_PREFIX, &body].concat());
        let (body, signature) =
            (BASE64_URL_SAFE_NO_PAD.encode(body), BASE64_URL_SAFE_NO_PAD.encode(signature));
        Ok(format!("{TOKEN_PREFIX}.{body}.{signature}"))
    }

    /// Decodes a pass; `None` unless `is_signed` accepts its signature.
    pub fn decode(text: &str, is_signed: impl FnOnce(&[u8], &[u8]) -> bool) -> Option<Self> {
        let rest =
            text.strip_prefix(TOKEN_PREFIX)?.strip_prefix('.').filter(|rest| rest.len() <= BYTES_MAX)?;
        let (body, signature) = rest.split_once('.')?;
        let body = BASE64_URL_SAFE_NO_PAD.decode(body).ok()?;
        let signature = BASE64_URL_SAFE_NO_PAD.decode(signature).ok()?;
        if !is_signed(&[SIGNED_PREFIX, &body].concat(), &signature) {
            return None;
        }
        serde_json::from_slice(&body).ok()
    }

    /// Returns whether the pass permits a request to a shim.
    pub fn allows(&self, path: &str, query: Option<&str>) -> bool {
        let named =
            path.strip_prefix("/api/tasks/").and_then(|rest| rest.strip_suffix("/runner/api/connect"));
        let task = named.and_then(|id| id.parse::<SubmissionId>().ok());
        let port =
            query.and_then(|query| query.strip_prefix("port=")).and_then(|port| port.parse::<u16>().ok());
        let (Some(task), Some(port)) = (task, port) else { return false };
        self.tasks.get(&task).is_some_and(|ports| ports.contains(&port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_allows_only_the_ports_of_the_tasks_it_names() {
        let (one, two) = (SubmissionId(uuid::Uuid::from_u128(1)), SubmissionId(uuid::Uuid::from_u128(2)));
        let pass = PortPass {
            instance: InstanceId(uuid::Uuid::from_u128(9)),
            tasks: BTreeMap::from([(one, BTreeSet::from([8000, 8001]))]),
            expires_at: 1,
        };
        let text = pass.encode(|_| b"signature".to_vec()).unwrap();
        assert_eq!(PortPass::decode(&text, |_, signature| signature == b"signature"), Some(pass.clone()));
        assert_eq!(PortPass::decode(&text, |_, _| false), None);
        assert_eq!(PortPass::decode("a-credential", |_, _| true), None);
        let connect = |task: SubmissionId| format!("/api/tasks/{task}/runner/api/connect");
        assert!(
            pass.allows(&connect(one), Some("port=8000")) && pass.allows(&connect(one), Some("port=8001"))
        );
        for (path, query) in [
            (connect(one), Some("port=22")),
            (connect(one), Some("port=0")),
            (connect(one), Some("port=8000&port=22")),
            (connect(one), Some("x=1&port=8000")),
            (connect(one), None),
            (connect(two), Some("port=8000")),
            (format!("/api/tasks/{one}"), Some("port=8000")),
            (format!("/api/tasks/{one}/runner/api/stop"), Some("port=8000")),
            (format!("/api/tasks/{two}/../{one}/runner/api/connect"), Some("port=8000")),
            ("/api/tasks".to_owned(), None),
        ] {
            assert!(!pass.allows(&path, query), "{path} {query:?}");
        }
    }
}

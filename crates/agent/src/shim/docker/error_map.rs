//! Classification of the engine's errors. Pure: maps a client error to a runtime error.
//!
//! Engines pass a registry's refusal on as text, so the text is the only source. The table below was collected from
//! Docker 20.10 and Podman 4.3; a text that is not in it becomes `Failed`, with the engine's text.

use bollard::errors::Error;

use crate::shim::runtime::RuntimeError;

/// Category of a failed registry request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegistryFailure {
    /// No such repository, tag or digest.
    NotFound,
    /// Missing, wrong or insufficient credentials.
    Unauthorized,
    /// Docker Hub reports private and absent repositories alike.
    NotFoundOrUnauthorized,
    /// The registry could not be reached, which proves nothing about the image.
    Unreachable,
    /// The engine's disk is full.
    DiskFull,
    /// The name or the platform cannot be served with any credentials.
    Unusable,
    /// Any other failure; the engine's text explains it.
    Other,
}

const DISK_FULL_PHRASES: &[&str] = &["no space left on device", "disk quota exceeded"];
const NOT_FOUND_OR_UNAUTHORIZED_PHRASES: &[&str] = &["repository does not exist or may require"];
const UNAUTHORIZED_PHRASES: &[&str] = &[
    "unauthorized",
    "authentication required",
    "no basic auth credentials",
    "incorrect username or password",
    "access denied",
    "access to the resource is denied",
    "invalid username/password",
    "403 forbidden",
    "401 unauthorized",
];
const NOT_FOUND_PHRASES: &[&str] =
    &["manifest unknown", "name unknown", "not found", "no such image", "image not known", "404 (not found)"];
const UNUSABLE_PHRASES: &[&str] =
    &["invalid reference format", "no matching manifest", "no image found in", "must be lower"];
const UNREACHABLE_PHRASES: &[&str] = &[
    "connection refused",
    "connection reset",
    "no such host",
    "i/o timeout",
    "tls handshake timeout",
    "client.timeout exceeded",
    "request canceled while waiting",
    "context deadline exceeded",
    "network is unreachable",
    "no route to host",
    "temporary failure in name resolution",
    "server misbehaving",
    "bad gateway",
    "service unavailable",
    "gateway timeout",
    "toomanyrequests",
];

/// Classifies the engine's text about a registry. The order matters: an error about a full disk also mentions the layer
/// that failed, and a name server may report an unreachable host as "not found".
pub(super) fn classify_registry_error(message: &str) -> RegistryFailure {
    let message = message.to_lowercase();
    let any = |words: &[&str]| words.iter().any(|word| message.contains(word));
    let table = [
        (DISK_FULL_PHRASES, RegistryFailure::DiskFull),
        (UNREACHABLE_PHRASES, RegistryFailure::Unreachable),
        (NOT_FOUND_OR_UNAUTHORIZED_PHRASES, RegistryFailure::NotFoundOrUnauthorized),
        (UNAUTHORIZED_PHRASES, RegistryFailure::Unauthorized),
        (UNUSABLE_PHRASES, RegistryFailure::Unusable),
        (NOT_FOUND_PHRASES, RegistryFailure::NotFound),
    ];
    table.into_iter().find(|(words, _)| any(words)).map_or(RegistryFailure::Other, |(_, verdict)| verdict)
}

/// Returns whether the engine could not be reached or did not finish its response.
pub(super) fn is_engine_unavailable(error: &Error) -> bool {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the client's list of errors grows with its features")]
    match error {
        Error::RequestTimeoutError
        | Error::SocketNotFoundError(_)
        | Error::IOError { .. }
        | Error::HyperResponseError { .. }
        | Error::HyperLegacyError { .. } => true,
        // Podman and newer engines respond with 503 while they start or stop.
        Error::DockerResponseServerError { status_code, .. } => *status_code == 503,
        _ => false,
    }
}

pub(super) fn error_status(error: &Error) -> Option<u16> {
    let Error::DockerResponseServerError { status_code, .. } = error else { return None };
    Some(*status_code)
}

/// Returns the engine's message, without the client's prefix.
pub(super) fn engine_message(error: &Error) -> String {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the client's list of errors grows with its features")]
    match error {
        Error::DockerResponseServerError { message, .. } => message.trim().to_owned(),
        Error::DockerStreamError { error } => error.trim().to_owned(),
        other => other.to_string(),
    }
}

/// Classifies an error of any call except a pull.
pub(super) fn from_call_error(what: impl Into<String>, error: Error) -> RuntimeError {
    let what = what.into();
    if is_engine_unavailable(&error) {
        return RuntimeError::Away { what, source: Box::new(error) };
    }
    let words = engine_message(&error);
    if classify_registry_error(&words) == RegistryFailure::DiskFull {
        return RuntimeError::NoDisk { what };
    }
    match error_status(&error) {
        // The engine understood the request and refused it: a retry changes nothing.
        Some(400 | 403 | 404 | 409) => RuntimeError::Refused { what, why: words },
        Some(_) | None => RuntimeError::Failed { what, source: Box::new(error) },
    }
}

/// Classifies an error of a pull or of a registry query through the engine.
pub(super) fn from_registry_error(image: &str, with_credentials: bool, error: Error) -> RuntimeError {
    let what = image.to_owned();
    if is_engine_unavailable(&error) {
        return RuntimeError::Away { what: format!("failed to pull image {image}"), source: Box::new(error) };
    }
    match classify_registry_error(&engine_message(&error)) {
        RegistryFailure::NotFound => RuntimeError::NoImage { what },
        RegistryFailure::NotFoundOrUnauthorized if with_credentials => RuntimeError::Unauthorized { what },
        RegistryFailure::NotFoundOrUnauthorized => RuntimeError::NoImage { what },
        RegistryFailure::Unauthorized => RuntimeError::Unauthorized { what },
        RegistryFailure::DiskFull => RuntimeError::NoDisk { what: format!("failed to pull image {image}") },
        RegistryFailure::Unusable => RuntimeError::Refused { what, why: engine_message(&error) },
        RegistryFailure::Unreachable | RegistryFailure::Other => {
            RuntimeError::Failed { what: format!("failed to pull image {image}"), source: Box::new(error) }
        }
    }
}

/// Classifies an error of a local file operation.
pub(super) fn from_io_error(what: impl Into<String>, source: std::io::Error) -> RuntimeError {
    let what = what.into();
    if source.kind() == std::io::ErrorKind::StorageFull {
        return RuntimeError::NoDisk { what };
    }
    RuntimeError::Failed { what, source: Box::new(source) }
}

/// Error for an engine that did not respond in time. The request may have been executed.
pub(super) fn timed_out(what: impl Into<String>) -> RuntimeError {
    RuntimeError::Away { what: what.into(), source: Box::new(Error::RequestTimeoutError) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(message: &str, verdict: RegistryFailure) {
        assert_eq!(classify_registry_error(message), verdict, "{message}");
    }

    #[test]
    fn registry_errors_of_engines_are_classified() {
        check(
            "manifest for 127.0.0.1:5000/a:1 not found: manifest unknown: manifest unknown",
            RegistryFailure::NotFound,
        );
        check(
            "repository a not found: name unknown: repository name not known to registry",
            RegistryFailure::NotFound,
        );
        check(
            "pull access denied for a/b, repository does not exist or may require 'docker login': denied: \
             requested access to the resource is denied",
            RegistryFailure::NotFoundOrUnauthorized,
        );
        check(
            "Head \"http://127.0.0.1:1/v2/a/manifests/1\": no basic auth credentials",
            RegistryFailure::Unauthorized,
        );
        check("unauthorized: authentication required", RegistryFailure::Unauthorized);
        check(
            "Get \"http://127.0.0.1:1/v2/\": dial tcp 127.0.0.1:1: connect: connection refused",
            RegistryFailure::Unreachable,
        );
        check(
            "Get \"https://r.example/v2/\": dial tcp: lookup r.example: no such host",
            RegistryFailure::Unreachable,
        );
        check("write /data/tmp/GetImageBlob1: no space left on device", RegistryFailure::DiskFull);
        check("no matching manifest for linux/arm64 in the manifest list entries", RegistryFailure::Unusable);
        check("filesystem layer verification failed for digest sha256:00", RegistryFailure::Other);
    }

    #[test]
    fn a_denied_pull_is_a_missing_image_without_credentials_and_unauthorized_with_them() {
        let error = || Error::DockerResponseServerError {
            status_code: 404,
            message: "pull access denied for a/b, repository does not exist or may require 'docker login'"
                .into(),
        };
        assert!(matches!(from_registry_error("a/b", false, error()), RuntimeError::NoImage { .. }));
        assert!(matches!(from_registry_error("a/b", true, error()), RuntimeError::Unauthorized { .. }));
    }

    #[test]
    fn an_unresponsive_engine_is_away_and_one_that_refuses_is_not() {
        assert!(matches!(from_call_error("x", Error::RequestTimeoutError), RuntimeError::Away { .. }));
        let no = Error::DockerResponseServerError { status_code: 400, message: "bad parameter".into() };
        assert!(
            matches!(from_call_error("x", no), RuntimeError::Refused { why, .. } if why == "bad parameter")
        );
        let full = Error::DockerResponseServerError {
            status_code: 500,
            message: "mkdir: no space left on device".into(),
        };
        assert!(matches!(from_call_error("x", full), RuntimeError::NoDisk { .. }));
    }
}

//! Errors of AWS, and what follows from each.

use windlass_backend::BackendError;

use crate::xml::Element;

/// Maximum length of a message of AWS that is shown.
const MESSAGE_CHARS_MAX: usize = 400;

/// Failure of a call.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// AWS answered with an error.
    #[error("{code}: {message}")]
    Answer { status: u16, code: String, message: String },
    /// No answer, or no usable one.
    #[error("{message}")]
    Connection { message: String },
    /// There are no credentials to sign the request with.
    #[error("{message}")]
    Credentials { message: String },
}

/// Consequence of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// Not there now: another zone, type or market may have it.
    NoCapacity,
    /// A limit of the account: another type, market or region may be below its limit.
    Quota,
    /// Too many requests: the same one succeeds later.
    Throttled,
    /// No answer, or an error of AWS: the same request may succeed later.
    Unavailable,
    /// The keys are wrong, or have expired.
    Credentials,
    /// The account may not do this.
    Permission,
    /// It does not exist.
    NotFound,
    /// It exists already, or is in another state than the request expects.
    Conflict,
    /// The request itself is wrong.
    Invalid,
}

impl ErrorClass {
    fn from_code(code: &str, status: u16) -> Self {
        match code {
            "InsufficientInstanceCapacity"
            | "InsufficientHostCapacity"
            | "InsufficientReservedInstanceCapacity"
            | "InsufficientCapacityOnHost"
            | "InsufficientCapacity"
            | "InsufficientFreeAddressesInSubnet"
            | "InsufficientAddressCapacity"
            | "InsufficientVolumeCapacity"
            | "ReservationCapacityExceeded"
            | "SpotMaxPriceTooLow"
            | "UnfulfillableCapacity"
            // The zone does not have the type.
            | "Unsupported" => Self::NoCapacity,
            "VcpuLimitExceeded"
            | "InstanceLimitExceeded"
            | "InstanceCreditSpecificationLimitExceeded"
            | "MaxSpotInstanceCountExceeded"
            | "MaxSpotFleetRequestCountExceeded"
            | "VolumeLimitExceeded"
            | "VolumeTypeNotAvailableInZone"
            | "MaxIOPSLimitExceeded"
            | "ResourceLimitExceeded"
            | "AddressLimitExceeded"
            | "SecurityGroupLimitExceeded"
            | "PendingVerification" => Self::Quota,
            "RequestLimitExceeded"
            | "RequestThrottled"
            | "RequestThrottledException"
            | "Throttling"
            | "ThrottlingException"
            | "ThrottledException"
            | "EC2ThrottledException"
            | "TooManyRequestsException"
            | "BandwidthLimitExceeded"
            | "PriorRequestNotComplete"
            | "SlowDown" => Self::Throttled,
            "AuthFailure"
            | "Blocked"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "IncompleteSignature"
            | "InvalidAccessKeyId"
            | "InvalidClientTokenId"
            | "InvalidIdentityToken"
            | "MissingAuthenticationToken"
            | "OptInRequired"
            | "RequestExpired"
            | "SignatureDoesNotMatch"
            | "UnrecognizedClientException" => Self::Credentials,
            "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => Self::Permission,
            "ParameterNotFound" => Self::NotFound,
            "IncorrectState"
            | "IncorrectInstanceState"
            | "IdempotentParameterMismatch"
            | "VolumeInUse"
            | "ResourceAlreadyExists" => Self::Conflict,
            "InternalError" | "InternalFailure" | "InternalServerError" | "RequestTimeout" | "ServiceUnavailable"
            | "Unavailable" => Self::Unavailable,
            _ if code.contains("NotFound") => Self::NotFound,
            _ if code.ends_with("Duplicate") || code.ends_with("AlreadyExists") => Self::Conflict,
            _ if code.contains("LimitExceeded") => Self::Quota,
            _ if status == 429 => Self::Throttled,
            _ if status >= 500 => Self::Unavailable,
            _ if status == 401 => Self::Credentials,
            _ if status == 403 => Self::Permission,
            _ => Self::Invalid,
        }
    }
}

impl ApiError {
    pub(crate) fn connection(message: impl Into<String>) -> Self {
        Self::Connection { message: message.into() }
    }

    /// Reads the error of an answer of the query protocol. EC2 and the other services nest it differently.
    pub(crate) fn from_xml(status: u16, body: &str) -> Self {
        let root = Element::parse(body).unwrap_or_default();
        let error = ["Errors/Error", "Error"].into_iter().find_map(|path| root.at(path));
        let of = |name| error.and_then(|error| error.text(name)).unwrap_or_default();
        let code = if of("Code").is_empty() { format!("HTTP {status}") } else { of("Code").to_owned() };
        Self::Answer { status, code, message: shortened(of("Message")) }
    }

    /// Reads the error of an answer of the JSON protocol.
    pub(crate) fn from_json(status: u16, body: &[u8]) -> Self {
        let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        // `com.amazonaws.ssm#ParameterNotFound`
        let code = value["__type"].as_str().map(|kind| kind.rsplit('#').next().unwrap_or(kind).to_owned());
        let message = value["message"].as_str().or(value["Message"].as_str()).unwrap_or_default();
        let code = code.unwrap_or_else(|| format!("HTTP {status}"));
        Self::Answer { status, code, message: shortened(message) }
    }

    pub(crate) fn code(&self) -> &str {
        match self {
            Self::Answer { code, .. } => code,
            Self::Connection { .. } | Self::Credentials { .. } => "",
        }
    }

    pub(crate) fn class(&self) -> ErrorClass {
        match self {
            Self::Answer { status, code, .. } => ErrorClass::from_code(code, *status),
            Self::Connection { .. } => ErrorClass::Unavailable,
            Self::Credentials { .. } => ErrorClass::Credentials,
        }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.class() == ErrorClass::NotFound
    }

    /// Returns whether the keys have expired: new ones may exist.
    pub(crate) fn is_expired(&self) -> bool {
        ["ExpiredToken", "ExpiredTokenException", "RequestExpired"].contains(&self.code())
    }

    /// Says what the error means for the caller of the backend. `what` is a verb phrase.
    pub(crate) fn to_backend(&self, what: &'static str) -> BackendError {
        match self.class() {
            ErrorClass::NoCapacity => BackendError::NoCapacity { message: self.to_string() },
            ErrorClass::Quota => BackendError::NoCapacity {
                message: format!(
                    "a quota of the account is reached: {self}; hint: request a higher one from AWS"
                ),
            },
            ErrorClass::Throttled => BackendError::Unavailable {
                what,
                message: format!("AWS limits the rate of requests: {self}"),
            },
            ErrorClass::Unavailable | ErrorClass::Conflict => {
                BackendError::Unavailable { what, message: self.to_string() }
            }
            ErrorClass::Credentials => BackendError::Refused {
                what,
                message: format!(
                    "AWS does not accept the credentials: {self}; hint: `windlass backend check aws`"
                ),
            },
            ErrorClass::Permission => BackendError::Refused {
                what,
                message: format!("a permission is missing: {self}; hint: `windlass backend check aws`"),
            },
            ErrorClass::NotFound | ErrorClass::Invalid => {
                BackendError::Refused { what, message: self.to_string() }
            }
        }
    }
}

/// Removes the part of a message that is only readable with another call, and limits its length.
fn shortened(message: &str) -> String {
    let message = message.split("Encoded authorization failure message").next().unwrap_or_default().trim();
    message.chars().take(MESSAGE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ec2(status: u16, code: &str) -> ApiError {
        let body = format!(
            "<?xml version=\"1.0\"?><Response><Errors><Error><Code>{code}</Code><Message>why. Encoded \
             authorization failure message: AbC</Message></Error></Errors><RequestID>r</RequestID></Response>"
        );
        ApiError::from_xml(status, &body)
    }

    #[test]
    fn each_code_has_its_consequence() {
        for (code, status, class) in [
            ("InsufficientInstanceCapacity", 500, ErrorClass::NoCapacity),
            ("Unsupported", 400, ErrorClass::NoCapacity),
            ("SpotMaxPriceTooLow", 400, ErrorClass::NoCapacity),
            ("VcpuLimitExceeded", 400, ErrorClass::Quota),
            ("MaxSpotInstanceCountExceeded", 400, ErrorClass::Quota),
            ("SomeNewLimitExceeded", 400, ErrorClass::Quota),
            ("RequestLimitExceeded", 503, ErrorClass::Throttled),
            ("SomethingElse", 429, ErrorClass::Throttled),
            ("AuthFailure", 401, ErrorClass::Credentials),
            ("ExpiredToken", 400, ErrorClass::Credentials),
            ("UnauthorizedOperation", 403, ErrorClass::Permission),
            ("InvalidInstanceID.NotFound", 400, ErrorClass::NotFound),
            ("InvalidPermission.Duplicate", 400, ErrorClass::Conflict),
            ("IncorrectState", 400, ErrorClass::Conflict),
            ("InvalidParameterValue", 400, ErrorClass::Invalid),
            ("InvalidAMIID.Malformed", 400, ErrorClass::Invalid),
            ("InternalError", 500, ErrorClass::Unavailable),
            ("Whatever", 502, ErrorClass::Unavailable),
        ] {
            assert_eq!(ec2(status, code).class(), class, "{code} {status}");
        }
        assert_eq!(ApiError::connection("reset").class(), ErrorClass::Unavailable);
        assert_eq!(ApiError::from_xml(503, "<html>no XML").class(), ErrorClass::Unavailable);
    }

    #[test]
    fn the_server_learns_whether_another_offer_or_another_attempt_helps() {
        let refusal = |code| ec2(400, code).to_backend("create the machine");
        assert!(matches!(refusal("InsufficientInstanceCapacity"), BackendError::NoCapacity { .. }));
        let quota = refusal("VcpuLimitExceeded");
        assert!(
            matches!(&quota, BackendError::NoCapacity { message } if message.contains("quota")),
            "{quota}"
        );
        assert!(matches!(refusal("RequestLimitExceeded"), BackendError::Unavailable { .. }));
        assert!(matches!(refusal("InvalidParameterValue"), BackendError::Refused { .. }));
        let denied = refusal("UnauthorizedOperation").to_string();
        assert!(denied.contains("a permission is missing") && !denied.contains("AbC"), "{denied}");
    }

    #[test]
    fn errors_of_all_protocols_are_read() {
        let sts = "<ErrorResponse><Error><Type>Sender</Type><Code>InvalidClientTokenId</Code><Message>The security \
                   token is invalid</Message></Error></ErrorResponse>";
        assert_eq!(ApiError::from_xml(403, sts).class(), ErrorClass::Credentials);
        let ssm = br#"{"__type":"com.amazonaws.ssm#ParameterNotFound","message":"none"}"#;
        assert!(ApiError::from_json(400, ssm).is_not_found());
        assert_eq!(ApiError::from_json(500, b"?").class(), ErrorClass::Unavailable);
    }
}

//! Definition of an operation: name, path, access, request and response.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, de::DeserializeOwned};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

/// Callers who may call an operation. The router checks it before the handler runs; handlers may only narrow it
/// further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No authentication.
    Open,
    /// Any valid token. Handlers narrow the response to what the caller may see.
    Token,
    /// The user named in the body, or a global admin. Checked by the handler, which reads the body.
    SelfOrAdmin,
    GlobalAdmin,
    /// A member of the project in the path, or any caller with a token if that project is public.
    ProjectPublic,
    /// Any member of the project in the path.
    ProjectUser,
    /// Any member for their own objects; managers for those of other users. The handler finds the creator.
    ProjectOwnerOrManager,
    /// Managers; others may only add or remove themselves. Checked by the handler.
    ProjectSelfOrManager,
    ProjectManager,
    ProjectAdmin,
    /// A gateway process, by the gateway's own token. User tokens are rejected.
    Gateway,
}

impl Access {
    pub const ALL: [Self; 11] = [
        Self::Open,
        Self::Token,
        Self::SelfOrAdmin,
        Self::GlobalAdmin,
        Self::ProjectPublic,
        Self::ProjectUser,
        Self::ProjectOwnerOrManager,
        Self::ProjectSelfOrManager,
        Self::ProjectManager,
        Self::ProjectAdmin,
        Self::Gateway,
    ];

    /// Returns the value of `x-access` in the OpenAPI document.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Token => "token",
            Self::SelfOrAdmin => "self-or-admin",
            Self::GlobalAdmin => "global-admin",
            Self::ProjectPublic => "project-public",
            Self::ProjectUser => "project-user",
            Self::ProjectOwnerOrManager => "project-owner-or-manager",
            Self::ProjectSelfOrManager => "project-self-or-manager",
            Self::ProjectManager => "project-manager",
            Self::ProjectAdmin => "project-admin",
            Self::Gateway => "gateway",
        }
    }

    /// True if the path names a project and the caller's role in it decides.
    pub const fn in_project(self) -> bool {
        match self {
            Self::Open | Self::Token | Self::SelfOrAdmin | Self::GlobalAdmin | Self::Gateway => false,
            Self::ProjectPublic
            | Self::ProjectUser
            | Self::ProjectOwnerOrManager
            | Self::ProjectSelfOrManager
            | Self::ProjectManager
            | Self::ProjectAdmin => true,
        }
    }

    /// Returns whether a caller with this role may apply the operation to their own object, or to one of another user.
    /// The server's checks and `docs/reference/rights.md` both use this. A public project admits more callers to
    /// `project-public` and `project-self-or-manager`.
    pub fn admits(self, role: CallerRole, object: Ownership) -> bool {
        let foreign = object == Ownership::Foreign;
        let least = match self {
            Self::Open => CallerRole::Anonymous,
            Self::Token => CallerRole::Outsider,
            Self::SelfOrAdmin => {
                if foreign {
                    CallerRole::GlobalAdmin
                } else {
                    CallerRole::Outsider
                }
            }
            Self::GlobalAdmin => CallerRole::GlobalAdmin,
            Self::ProjectPublic | Self::ProjectUser => CallerRole::User,
            Self::ProjectOwnerOrManager | Self::ProjectSelfOrManager => {
                if foreign {
                    CallerRole::Manager
                } else {
                    CallerRole::User
                }
            }
            Self::ProjectManager => CallerRole::Manager,
            Self::ProjectAdmin => CallerRole::ProjectAdmin,
            // Gateways have separate tokens, which no user has.
            Self::Gateway => return false,
        };
        role >= least
    }

    /// Returns whether access depends on the creator of the object.
    pub const fn depends_on_owner(self) -> bool {
        matches!(self, Self::SelfOrAdmin | Self::ProjectOwnerOrManager | Self::ProjectSelfOrManager)
    }
}

/// Role of a caller in the project of the operation. Each role includes the rights of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallerRole {
    /// No token.
    Anonymous,
    /// A user who is not a member of the project.
    Outsider,
    User,
    Manager,
    ProjectAdmin,
    GlobalAdmin,
}

impl CallerRole {
    pub const ALL: [Self; 6] =
        [Self::Anonymous, Self::Outsider, Self::User, Self::Manager, Self::ProjectAdmin, Self::GlobalAdmin];
}

/// Creator of the object of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// The caller.
    Own,
    /// Another user.
    Foreign,
}

/// Encoding of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// JSON object. An empty body means all defaults.
    Json,
    /// `multipart/form-data` with one part `file`; the request type is read from the query.
    File,
    /// No body: the request type is read from the query.
    Query,
    /// As `Query`, with a response in plain text instead of JSON.
    Text,
    /// As `Query`, with bytes as the response.
    Bytes,
    /// As `Query`, with a long-lived stream of events as the response; the response type is one event.
    Events,
    /// As `Query`, sent with `Upgrade: tcp`: the connection becomes a bidirectional stream of bytes.
    Stream,
}

pub trait Operation: 'static {
    /// Unique id, as `verb_noun`.
    const ID: &'static str;
    const SUMMARY: &'static str;
    const METHOD: Method;
    /// Path, with `{name}` for each parameter.
    const PATH: &'static str;
    const ACCESS: Access;
    const BODY: Body;
    type Request: Serialize + DeserializeOwned + JsonSchema + Send + 'static;
    type Response: Serialize + DeserializeOwned + JsonSchema + Send + 'static;
}

/// One row of the operation table, with types turned into values.
#[derive(Clone, Copy)]
pub struct Entry {
    pub id: &'static str,
    pub summary: &'static str,
    pub method: Method,
    pub path: &'static str,
    pub access: Access,
    pub body: Body,
    pub request: fn(&mut SchemaGenerator) -> Schema,
    pub response: fn(&mut SchemaGenerator) -> Schema,
}

impl Entry {
    pub fn of<O: Operation>() -> Self {
        Self {
            id: O::ID,
            summary: O::SUMMARY,
            method: O::METHOD,
            path: O::PATH,
            access: O::ACCESS,
            body: O::BODY,
            request: |schemas| schemas.subschema_for::<O::Request>(),
            response: |schemas| schemas.subschema_for::<O::Response>(),
        }
    }

    /// Returns the names of the path parameters, in order.
    pub fn parameters(&self) -> impl Iterator<Item = &'static str> {
        self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }
}

/// Declares operations and the table of all operations.
macro_rules! operations {
    ($( #[doc = $summary:literal] $name:ident = $id:literal:
        $method:ident $body:ident $path:literal $access:ident ($request:ty) -> $response:ty; )*) => {
        $(
            #[doc = $summary]
            #[derive(Clone, Copy, Debug)]
            pub enum $name {}

            impl $crate::operation::Operation for $name {
                const ID: &'static str = $id;
                const SUMMARY: &'static str = $summary;
                const METHOD: $crate::operation::Method = $crate::operation::Method::$method;
                const PATH: &'static str = $path;
                const ACCESS: $crate::operation::Access = $crate::operation::Access::$access;
                const BODY: $crate::operation::Body = $crate::operation::Body::$body;
                type Request = $request;
                type Response = $response;
            }
        )*

        /// Returns all operations, in the order of the source.
        pub fn table() -> Vec<$crate::operation::Entry> {
            vec![$( $crate::operation::Entry::of::<$name>(), )*]
        }
    };
}
pub(crate) use operations;

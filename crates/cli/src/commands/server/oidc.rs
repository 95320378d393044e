//! Flags of `windlass server` for the identity provider with which users log in to the web UI.

use std::path::PathBuf;

use windlass_server::config::OidcSource;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Identity provider")]
pub(crate) struct OidcArgs {
    /// URL of the OpenID Connect provider with which users log in to the web UI
    #[arg(long, env = "WINDLASS_SERVER_OIDC_ISSUER", global = true, value_name = "URL")]
    oidc_issuer: Option<String>,
    /// Id of this server at the provider
    #[arg(long, env = "WINDLASS_SERVER_OIDC_CLIENT_ID", global = true, value_name = "ID")]
    oidc_client_id: Option<String>,
    /// File with the secret of this server at the provider; not needed for public clients
    #[arg(long, env = "WINDLASS_SERVER_OIDC_CLIENT_SECRET_FILE", global = true, value_name = "FILE")]
    oidc_client_secret_file: Option<PathBuf>,
    /// Name of the provider on the login page; its host by default
    #[arg(long, env = "WINDLASS_SERVER_OIDC_NAME", global = true, value_name = "NAME")]
    oidc_name: Option<String>,
    /// Create users at their first login, not only log in those whose address an admin entered
    #[arg(long, env = "WINDLASS_SERVER_OIDC_CREATE_USERS", global = true)]
    oidc_create_users: bool,
    /// Roles in projects that groups of the provider give: `ml=research:user,leads=research:manager`
    #[arg(long, env = "WINDLASS_SERVER_OIDC_GROUPS", global = true, value_name = "GROUP=PROJECT:ROLE,…")]
    oidc_groups: Option<String>,
    /// Claim that lists the groups of a user; `groups` by default
    #[arg(long, env = "WINDLASS_SERVER_OIDC_GROUPS_CLAIM", global = true, value_name = "CLAIM")]
    oidc_groups_claim: Option<String>,
}

impl From<OidcArgs> for OidcSource {
    fn from(flags: OidcArgs) -> Self {
        Self {
            issuer: flags.oidc_issuer,
            client_id: flags.oidc_client_id,
            client_secret_file: flags.oidc_client_secret_file,
            name: flags.oidc_name,
            create_users: flags.oidc_create_users.then_some(true),
            groups: flags.oidc_groups,
            groups_claim: flags.oidc_groups_claim,
        }
    }
}

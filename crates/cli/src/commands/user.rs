//! `windlass user`: users of the server.

use windlass_api::{
    operations::{
        CreateToken, CreateUser, DeleteUsers, ListTokens, ListUsers, ReadUser, RefreshToken, RevokeTokens,
        UpdateUser,
    },
    server::EmptyRequest,
    users::{
        CreateRequest, CreateTokenRequest, DeleteRequest, GlobalRole, ListRequest, NameRequest, NamedToken,
        RevokeTokensRequest, TokenScope, User, UserList, UserWithCreds,
    },
};
use windlass_model::config::quantities::parse_duration;

use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context, closest_name},
    error::{CliError, ErrorCode},
    exit::Exit,
    output::{
        self, ListView,
        detail_view::DetailView,
        format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass user                                  list users
  windlass user create ada > token.txt           create a user; the token is printed only once
  windlass user grant ada queue                  allow container requests; `revoke` withdraws the right
  windlass user refresh-token ada                replace all tokens of a user with a new one
  windlass user token create ci --scope submit --expires 30d > ci.token
  windlass user delete -y ada

Users see the projects of which they are members. To add a member: `windlass project members main --set ada=user`.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List users: all for an admin, else yourself
    #[command(after_help = "Examples:\n  windlass user list -o wide")]
    List,
    /// Show a user
    #[command(after_help = "Examples:\n  windlass user get ada")]
    Get {
        /// Name of the user
        #[arg(value_name = "USER")]
        name: String,
    },
    /// Create a user and print their token
    #[command(after_help = "Examples:\n  windlass user create ada --email ada@example.org > token.txt")]
    Create {
        /// Name of the user
        #[arg(value_name = "USER")]
        name: String,
        /// Make the user a global admin
        #[arg(long)]
        admin: bool,
        /// Email address
        #[arg(long, value_name = "ADDRESS")]
        email: Option<String>,
        /// Let the user request containers of the queue
        #[arg(long)]
        queue: bool,
    },
    /// Grant a right to a user
    #[command(after_help = "Examples:\n  windlass user grant ada queue")]
    Grant {
        /// Name of the user
        #[arg(value_name = "USER")]
        name: String,
        /// Right to grant
        #[arg(value_enum, value_name = "RIGHT")]
        right: Right,
    },
    /// Revoke a right of a user
    #[command(after_help = "Examples:\n  windlass user revoke ada queue")]
    Revoke {
        /// Name of the user
        #[arg(value_name = "USER")]
        name: String,
        /// Right to revoke
        #[arg(value_enum, value_name = "RIGHT")]
        right: Right,
    },
    /// Manage your additional tokens, each with a name, a scope and an expiry
    #[command(after_help = TOKENS)]
    Token {
        #[command(subcommand)]
        action: Option<TokenAction>,
    },
    /// Replace all tokens of a user with a new one and print it
    #[command(after_help = "Examples:\n  windlass user refresh-token -y ada > token.txt")]
    RefreshToken {
        /// Name of the user
        #[arg(value_name = "USER")]
        name: String,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
    /// Delete users
    #[command(after_help = "Examples:\n  windlass user delete -y ada")]
    Delete {
        /// Names of the users
        #[arg(required = true, value_name = "USER")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

/// A right that an admin grants to individual users.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Right {
    /// Request containers of the queue
    Queue,
}

const TOKENS: &str = "\
Examples:
  windlass user token                                              list your additional tokens
  windlass user token create ci --scope submit --expires 30d > ci.token
  windlass user token create app --scope services                  only for requests to services
  windlass user token revoke -y ci

Scopes: `all` permits all that you may do; `read` permits reading; `submit` permits reading, running and stopping;
`services` permits requests to services. Streams that were opened with a token end when it is revoked.";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum TokenAction {
    /// List your additional tokens
    #[command(after_help = "Examples:\n  windlass user token list -o json")]
    List,
    /// Create a token and print it
    #[command(
        after_help = "Examples:\n  windlass user token create ci --scope read --expires 30d > ci.token"
    )]
    Create {
        /// Name of the token
        #[arg(value_name = "NAME")]
        name: String,
        /// Scope of the token
        #[arg(long, value_enum, default_value_t = ScopeArg::All)]
        scope: ScopeArg,
        /// Lifetime, such as `12h` or `30d`; defaults to the setting of the server
        #[arg(long, value_name = "TIME", value_parser = parse_expiry)]
        expires: Option<i64>,
    },
    /// Revoke tokens
    #[command(after_help = "Examples:\n  windlass user token revoke -y ci")]
    Revoke {
        /// Names of the tokens
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum ScopeArg {
    All,
    Read,
    Submit,
    Services,
}

impl From<ScopeArg> for TokenScope {
    fn from(word: ScopeArg) -> Self {
        match word {
            ScopeArg::All => Self::All,
            ScopeArg::Read => Self::Read,
            ScopeArg::Submit => Self::Submit,
            ScopeArg::Services => Self::Services,
        }
    }
}

fn parse_expiry(text: &str) -> Result<i64, String> {
    parse_duration(text).and_then(|seconds| match seconds {
        1.. => Ok(seconds),
        _ => Err("expected a duration such as `12h` or `30d`".to_owned()),
    })
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let users = list(cx).await?;
            let name = |user: &User| user.username.clone();
            ListView { project: None, kind: "users", name, none: "No users." }.print(
                &users,
                format,
                |wide| table(&users, wide),
            )?;
            Ok(Exit::Done)
        }
        Some(Action::Get { name }) => {
            let user = fetch_without_creds(cx, name).await?;
            output::print_one(format, &user, name, |_| facts(&user).print())?;
            Ok(Exit::Done)
        }
        Some(Action::Create { name, admin, email, queue }) => {
            let global_role = if *admin { GlobalRole::Admin } else { GlobalRole::User };
            let request = CreateRequest {
                username: name.clone(),
                global_role,
                email: email.clone(),
                active: true,
                can_use_queue: queue.then_some(true),
            };
            let user = cx.call::<CreateUser>(&request).await?;
            print_token(format, &user, &format!("Created user `{name}`."))
        }
        Some(Action::Grant { name, right }) => change(cx, format, name, *right, true).await,
        Some(Action::Revoke { name, right }) => change(cx, format, name, *right, false).await,
        Some(Action::Token { action }) => run_token_action(cx, format, action.as_ref()).await,
        Some(Action::RefreshToken { name, yes }) => {
            fetch_without_creds(cx, name).await?;
            let question = format!("Replace all tokens of `{name}`? They become invalid immediately.");
            if !output::confirm(*yes, &question)? {
                output::print_message("Nothing was changed.");
                return Ok(Exit::Failed);
            }
            let user = cx.call::<RefreshToken>(&NameRequest { username: name.clone() }).await?;
            print_token(format, &user, &format!("The old tokens of `{name}` are no longer valid."))
        }
        Some(Action::Delete { names, yes }) => {
            let request = DeleteRequest { users: names.clone() };
            let call = async || cx.call::<DeleteUsers>(&request).await.map(drop);
            output::delete(names, *yes, "Deleted", async |name| fetch_without_creds(cx, name).await, call)
                .await
        }
    })
}

async fn run_token_action(
    cx: &Context,
    format: Format,
    action: Option<&TokenAction>,
) -> Result<Exit, CliError> {
    match action {
        None | Some(TokenAction::List) => {
            let tokens = cx.call::<ListTokens>(&EmptyRequest {}).await?;
            let name = |token: &NamedToken| token.name.clone();
            ListView { project: None, kind: "tokens", name, none: "No additional tokens." }.print(
                &tokens,
                format,
                |_| token_table(&tokens),
            )?;
            Ok(Exit::Done)
        }
        Some(TokenAction::Create { name, scope, expires }) => {
            let request =
                CreateTokenRequest { name: name.clone(), scope: (*scope).into(), expires_in: *expires };
            let made = cx.call::<CreateToken>(&request).await?;
            let until = made
                .about
                .expires_at
                .map_or_else(|| "It does not expire.".to_owned(), |at| format!("It expires at {at}."));
            output::print_message(&if format == Format::Name {
                format!(
                    "The token was not shown. Run `windlass user token revoke {name}` and create another one."
                )
            } else {
                format!("{until} This is the token; it is not shown again:")
            });
            output::print_one(format, &made, name, |_| output::print_data(&made.token))?;
            Ok(Exit::Done)
        }
        Some(TokenAction::Revoke { names, yes }) => {
            let all = cx.call::<ListTokens>(&EmptyRequest {}).await?;
            let find = async |name: &str| match all.iter().find(|token| token.name == name) {
                Some(token) => Ok(token.clone()),
                None => Err(CliError::new(format!("you have no token named `{name}`"))
                    .code(ErrorCode::UnknownName)
                    .hint("run `windlass user token` to list them")),
            };
            let request = RevokeTokensRequest { names: names.clone() };
            let call = async || cx.call::<RevokeTokens>(&request).await.map(drop);
            output::delete(names, *yes, "Revoked", find, call).await
        }
    }
}

fn token_table(tokens: &[NamedToken]) -> Table {
    let now = format::now();
    let mut table = Table::new(vec!["NAME", "SCOPE", "BEGINS", "CREATED", "EXPIRES", "USED"]);
    for token in tokens {
        table.row(vec![
            token.name.as_str().into(),
            token.scope.name().into(),
            token.prefix.as_str().into(),
            format::ago(token.created_at, now).into(),
            token.expires_at.map_or_else(|| "never".to_owned(), |at| at.to_string()).into(),
            token.last_used_at.map_or_else(|| "never".to_owned(), |at| format::ago(at, now)).into(),
        ]);
    }
    table
}

async fn list(cx: &Context) -> Result<Vec<User>, CliError> {
    Ok(match cx.call::<ListUsers>(&ListRequest { ascending: true, ..ListRequest::default() }).await? {
        UserList::Plain(users) | UserList::Counted { users, .. } => users,
    })
}

/// Returns a user without credentials, which only `create` and `refresh-token` print.
async fn fetch_without_creds(cx: &Context, name: &str) -> Result<User, CliError> {
    match cx.try_call::<ReadUser>(&NameRequest { username: name.to_owned() }).await {
        Ok(UserWithCreds {
            id,
            username,
            created_at,
            global_role,
            email,
            active,
            permissions,
            ssh_public_key,
            ..
        }) => Ok(User { id, username, created_at, global_role, email, active, permissions, ssh_public_key }),
        Err(error) if error.is_not_found() => {
            let all = list(cx).await?;
            let problem =
                CliError::new(format!("no user named `{name}` on the server")).code(ErrorCode::UnknownName);
            Err(match closest_name(name, all.iter().map(|user| user.username.as_str())) {
                Some(near) => problem.hint(format!("did you mean `{near}`?")),
                None => problem.hint("run `windlass user` to list them"),
            })
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Grants or revokes a right; other attributes of the user stay unchanged.
async fn change(
    cx: &Context,
    format: Format,
    name: &str,
    right: Right,
    given: bool,
) -> Result<Exit, CliError> {
    let user = fetch_without_creds(cx, name).await?;
    let can_use_queue = match right {
        Right::Queue => Some(given),
    };
    let request = CreateRequest {
        username: user.username,
        global_role: user.global_role,
        email: user.email,
        active: user.active,
        can_use_queue,
    };
    let user = cx.call::<UpdateUser>(&request).await?;
    output::print_message(&match (given, user.permissions.can_use_queue) {
        (true, _) => format!("`{name}` may now submit container requests."),
        (false, false) => format!("`{name}` may no longer submit container requests."),
        (false, true) => format!("`{name}` is an admin and may still submit container requests."),
    });
    output::print_one(format, &user, name, |_| ())?;
    Ok(Exit::Done)
}

/// Prints only the token to stdout, for `windlass user create ada > token`.
fn print_token(format: Format, user: &UserWithCreds, done: &str) -> Result<Exit, CliError> {
    let name = &user.username;
    output::print_message(&if format == Format::Name {
        format!(
            "{done} The token was not shown. Run `windlass user refresh-token {name}` to create another one."
        )
    } else {
        format!("{done} This is the token; it is not shown again:")
    });
    let document = serde_json::json!({ "username": name, "token": user.creds.token });
    output::print_one(format, &document, name, |_| output::print_data(&user.creds.token))?;
    Ok(Exit::Done)
}

const fn role(user: &User) -> &'static str {
    match user.global_role {
        GlobalRole::Admin => "admin",
        GlobalRole::User => "user",
    }
}

fn facts(user: &User) -> DetailView {
    let mut facts = DetailView::new();
    facts.add("Name", &user.username);
    facts.add("Role", role(user));
    facts.add("Email", user.email.clone().unwrap_or_default());
    facts.add("Active", if user.active { "yes" } else { "no" });
    facts.add("May add projects", if user.permissions.can_create_projects { "yes" } else { "no" });
    facts.add("May use the queue", if user.permissions.can_use_queue { "yes" } else { "no" });
    facts.add("Created", user.created_at.map(|time| time.to_string()).unwrap_or_default());
    facts.add("SSH key", user.ssh_public_key.clone().unwrap_or_default().trim());
    facts
}

fn table(users: &[User], wide: bool) -> Table {
    let now = format::now();
    let mut head = vec!["NAME", "ROLE", "ACTIVE", "CREATED"];
    if wide {
        head.extend(["EMAIL", "ID"]);
    }
    let mut table = Table::new(head);
    for user in users {
        let created = user.created_at.map(|time| format::ago(time, now)).unwrap_or_default();
        let mut row: Vec<Cell> = vec![
            user.username.as_str().into(),
            role(user).into(),
            (if user.active { "yes" } else { "no" }).into(),
            created.into(),
        ];
        if wide {
            row.extend([user.email.clone().unwrap_or_default().into(), user.id.to_string().into()]);
        }
        table.row(row);
    }
    table
}

//! `windlass user`: people who may use the server.

use windlass_api::{
    operations::{CreateUser, DeleteUsers, ListUsers, ReadUser, RefreshToken, UpdateUser},
    users::{
        CreateRequest, DeleteRequest, GlobalRole, ListRequest, Listing, NameRequest, User, UserWithCreds,
    },
};

use crate::{
    cli::{At, Format, Output},
    context::{self, Context, closest},
    exit::Exit,
    output::{
        self, List,
        facts::Facts,
        table::{Cell, Table},
        words,
    },
    problem::{Code, Problem},
};

const EXAMPLES: &str = "\
Examples:
  windlass user                                  who there is
  windlass user create ada > token.txt           prints the token, which is shown only once
  windlass user refresh-token ada                a new token; the old one dies at once
  windlass user grant ada queue                  may ask for containers of the queue; `revoke` takes it back
  windlass user delete -y ada

A user sees the projects that they are a member of: `windlass project members main --set ada=user`.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List users: everyone for an admin, else yourself
    #[command(after_help = "Examples:\n  windlass user list -o wide")]
    List,
    /// Show one user
    #[command(after_help = "Examples:\n  windlass user get ada")]
    Get {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
    },
    /// Add a user and print their token
    #[command(after_help = "Examples:\n  windlass user create ada --email ada@example.org > token.txt")]
    Create {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
        /// May do everything on this server
        #[arg(long)]
        admin: bool,
        /// Where they get mail
        #[arg(long, value_name = "ADDRESS")]
        email: Option<String>,
        /// May ask for containers of the queue
        #[arg(long)]
        queue: bool,
    },
    /// Give a user a right
    #[command(after_help = "Examples:\n  windlass user grant ada queue")]
    Grant {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
        /// The right
        #[arg(value_enum, value_name = "RIGHT")]
        right: Right,
    },
    /// Take a right from a user
    #[command(after_help = "Examples:\n  windlass user revoke ada queue")]
    Revoke {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
        /// The right
        #[arg(value_enum, value_name = "RIGHT")]
        right: Right,
    },
    /// Replace the token of a user and print the new one
    #[command(visible_alias = "token")]
    #[command(after_help = "Examples:\n  windlass user refresh-token -y ada > token.txt")]
    RefreshToken {
        /// The user
        #[arg(value_name = "USER")]
        name: String,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
    /// Remove users
    #[command(after_help = "Examples:\n  windlass user delete -y ada")]
    Delete {
        /// The users
        #[arg(required = true, value_name = "USER")]
        names: Vec<String>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

/// What an admin gives to users one by one.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Right {
    /// Ask for containers of the queue
    Queue,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    let format = args.output.format;
    context::with(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let users = list(cx).await?;
            let name = |user: &User| user.username.clone();
            List { project: None, kind: "users", name, none: "No users." }
                .print(&users, format, |wide| table(&users, wide))?;
            Ok(Exit::Done)
        }
        Some(Action::Get { name }) => {
            let user = shown(cx, name).await?;
            output::one(format, &user, name, |_| facts(&user).print())?;
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
            token(format, &user, &format!("Added `{name}`."))
        }
        Some(Action::Grant { name, right }) => change(cx, format, name, *right, true).await,
        Some(Action::Revoke { name, right }) => change(cx, format, name, *right, false).await,
        Some(Action::RefreshToken { name, yes }) => {
            shown(cx, name).await?;
            let question = format!("Replace the token of `{name}`? The old one dies at once.");
            if !output::confirm(*yes, &question)? {
                output::say("Nothing was changed.");
                return Ok(Exit::Failed);
            }
            let user = cx.call::<RefreshToken>(&NameRequest { username: name.clone() }).await?;
            token(format, &user, &format!("The old token of `{name}` is dead."))
        }
        Some(Action::Delete { names, yes }) => {
            let request = DeleteRequest { users: names.clone() };
            let call = async || cx.call::<DeleteUsers>(&request).await.map(drop);
            output::delete(names, *yes, "Deleted", async |name| shown(cx, name).await, call).await
        }
    })
}

async fn list(cx: &Context) -> Result<Vec<User>, Problem> {
    Ok(match cx.call::<ListUsers>(&ListRequest { ascending: true, ..ListRequest::default() }).await? {
        Listing::Plain(users) | Listing::Counted { users, .. } => users,
    })
}

/// Without credentials: those are for whoever asks for a new one.
async fn shown(cx: &Context, name: &str) -> Result<User, Problem> {
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
        Err(error) if error.is_absent() => {
            let all = list(cx).await?;
            let problem =
                Problem::new(format!("no user named `{name}` on the server")).code(Code::UnknownName);
            Err(match closest(name, all.iter().map(|user| user.username.as_str())) {
                Some(near) => problem.hint(format!("did you mean `{near}`?")),
                None => problem.hint("`windlass user` lists them"),
            })
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Gives or takes a right, and leaves the rest of the user as it is.
async fn change(
    cx: &Context,
    format: Format,
    name: &str,
    right: Right,
    given: bool,
) -> Result<Exit, Problem> {
    let user = shown(cx, name).await?;
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
    output::say(&match (given, user.permissions.can_use_queue) {
        (true, _) => format!("`{name}` may ask for containers of the queue."),
        (false, false) => format!("`{name}` may not ask for containers of the queue any more."),
        (false, true) => format!("`{name}` is an admin, and may ask for containers all the same."),
    });
    output::one(format, &user, name, |_| ())?;
    Ok(Exit::Done)
}

/// The token alone is data: `windlass user create ada > token` is what one wants.
fn token(format: Format, user: &UserWithCreds, done: &str) -> Result<Exit, Problem> {
    let name = &user.username;
    output::say(&if format == Format::Name {
        format!("{done} The token was not shown: `windlass user refresh-token {name}` makes another one.")
    } else {
        format!("{done} This is the token; it is not shown again:")
    });
    let document = serde_json::json!({ "username": name, "token": user.creds.token });
    output::one(format, &document, name, |_| output::data(&user.creds.token))?;
    Ok(Exit::Done)
}

const fn role(user: &User) -> &'static str {
    match user.global_role {
        GlobalRole::Admin => "admin",
        GlobalRole::User => "user",
    }
}

fn facts(user: &User) -> Facts {
    let mut facts = Facts::new();
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
    let now = words::now();
    let mut head = vec!["NAME", "ROLE", "ACTIVE", "CREATED"];
    if wide {
        head.extend(["EMAIL", "ID"]);
    }
    let mut table = Table::new(head);
    for user in users {
        let created = user.created_at.map(|time| words::ago(time, now)).unwrap_or_default();
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

//! `windlass gateway`: commands on gateways of the project.

mod install;
mod serve;

use windlass_api::{
    gateways::{
        DeleteRequest, Gateway, ListRequest, NameRequest, SetDefaultRequest, SetWildcardDomainRequest,
    },
    operations::{
        CreateGatewayToken, DeleteGateways, ListGateways, ReadGateway, SetDefaultGateway, SetWildcardDomain,
    },
};

use crate::{
    cli::{OutputArgs, ServerArgs, WatchArgs},
    context::{self, Context},
    error::CliError,
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
  windlass gateway                                     list gateways and their domains
  windlass gateway update entry --set-default          make it the default gateway of services
  windlass gateway update entry --domain example.org   set the domain of its services
  windlass apply -f gateway.yml                        create or update a gateway
  windlass gateway install entry root@edge --server http://windlass:3000    install it on a host";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) listing: WatchArgs,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List gateways
    #[command(after_help = "Examples:\n  windlass gateway list")]
    List(WatchArgs),
    /// Show a gateway
    #[command(after_help = "Examples:\n  windlass gateway get entry")]
    Get {
        /// Name of the gateway
        #[arg(value_name = "GATEWAY")]
        name: String,
    },
    /// Update a gateway
    #[command(after_help = "Examples:\n  windlass gateway update entry --domain example.org --set-default")]
    Update {
        /// Name of the gateway
        #[arg(value_name = "GATEWAY")]
        name: String,
        /// Make it the default gateway of services
        #[arg(long)]
        set_default: bool,
        /// Domain of the services
        #[arg(long, value_name = "DOMAIN")]
        domain: Option<String>,
    },
    /// Create a token for the processes of a gateway and print it once; revokes the previous token
    #[command(after_help = "Examples:\n  windlass gateway token entry > entry.token")]
    Token {
        /// Name of the gateway
        #[arg(value_name = "GATEWAY")]
        name: String,
    },
    /// Run a gateway process on this host; a second process with the same state directory takes over without downtime
    #[command(after_help = serve::EXAMPLES)]
    Serve(Box<serve::Args>),
    /// Install a gateway process on hosts over SSH, or update it without downtime
    #[command(after_help = install::EXAMPLES)]
    Install(Box<install::Args>),
    /// Remove the gateway process from hosts
    #[command(after_help = "Examples:\n  windlass gateway uninstall entry root@edge")]
    Uninstall(install::HostArgs),
    /// Delete gateways
    #[command(after_help = "Examples:\n  windlass gateway delete -y entry")]
    Delete {
        /// Names of the gateways
        #[arg(required = true, value_name = "GATEWAY")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    if let Some(Action::Serve(serving)) = &args.action {
        return serve::run(serving);
    }
    if let Some(Action::Uninstall(hosts)) = &args.action {
        return install::uninstall(hosts);
    }
    let listing = match &args.action {
        Some(Action::List(listing)) => listing,
        _ => &args.listing,
    };
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List(_)) => {
            let none = "No gateways. Run `windlass apply -f FILE` to create one.";
            let name = |gateway: &Gateway| gateway.name.clone();
            let list = ListView { project: Some(&cx.project), kind: "gateways", name, none };
            list.show(format, listing.watch, async || self::list(cx).await, table).await
        }
        Some(Action::Get { name }) => {
            let gateway = find(cx, name).await?;
            output::print_one(format, &gateway, name, |_| facts(&gateway).print())?;
            Ok(Exit::Done)
        }
        Some(Action::Update { name, set_default, domain }) => {
            let gateway = update(cx, name, *set_default, domain.clone()).await?;
            output::print_one(format, &gateway, name, |_| {
                output::print_message(&format!("Updated `{name}`."))
            })?;
            Ok(Exit::Done)
        }
        Some(Action::Token { name }) => {
            find(cx, name).await?;
            let made = cx.call::<CreateGatewayToken>(&NameRequest { name: name.clone() }).await?;
            output::print_data(&made.token);
            Ok(Exit::Done)
        }
        Some(Action::Install(install)) => install::install(cx, install).await,
        // These need no login and are handled above.
        Some(Action::Serve(_) | Action::Uninstall(_)) => Ok(Exit::Done),
        Some(Action::Delete { names, yes }) => {
            let request = DeleteRequest { names: names.clone() };
            let call = async || cx.call::<DeleteGateways>(&request).await.map(drop);
            output::delete(names, *yes, "Deleting", async |name| find(cx, name).await, call).await
        }
    })
}

async fn list(cx: &Context) -> Result<Vec<Gateway>, CliError> {
    cx.call::<ListGateways>(&ListRequest { include_imported: true }).await
}

pub(crate) async fn find(cx: &Context, name: &str) -> Result<Gateway, CliError> {
    match cx.try_call::<ReadGateway>(&NameRequest { name: name.to_owned() }).await {
        Ok(gateway) => Ok(gateway),
        Err(error) if error.is_not_found() => {
            let all = list(cx).await?;
            Err(cx.unknown("gateway", name, all.iter().map(|gateway| gateway.name.as_str())))
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

async fn update(
    cx: &Context,
    name: &str,
    set_default: bool,
    domain: Option<String>,
) -> Result<Gateway, CliError> {
    if !set_default && domain.is_none() {
        return Err(CliError::usage("nothing to change").hint("pass `--set-default` or `--domain DOMAIN`"));
    }
    find(cx, name).await?;
    if set_default {
        let request = SetDefaultRequest { name: name.to_owned(), gateway_project: None };
        cx.call::<SetDefaultGateway>(&request).await?;
    }
    if domain.is_some() {
        let request = SetWildcardDomainRequest { name: name.to_owned(), wildcard_domain: domain };
        cx.call::<SetWildcardDomain>(&request).await?;
    }
    find(cx, name).await
}

fn facts(gateway: &Gateway) -> DetailView {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let mut facts = DetailView::new();
    facts.add("Name", &gateway.name);
    facts.status("Status", &gateway.status);
    facts.add("Why", text(&gateway.status_message));
    facts.add("Default", if gateway.default { "yes" } else { "no" });
    facts.add("Domain", text(&gateway.wildcard_domain));
    facts.add("Hostname", text(&gateway.hostname));
    facts.add("Backend", text(&gateway.backend));
    facts.add("Region", text(&gateway.region));
    facts.add("Created", gateway.created_at.to_string());
    facts
}

fn table(gateways: &[Gateway], wide: bool) -> Table {
    let now = format::now();
    let mut head = vec!["NAME", "BACKEND", "HOSTNAME", "DOMAIN", "DEFAULT", "STATUS"];
    if wide {
        head.extend(["REGION", "CREATED", "ERROR"]);
    }
    let mut table = Table::new(head);
    for gateway in gateways {
        let mut row = vec![
            gateway.name.as_str().into(),
            gateway.backend.clone().unwrap_or_default().into(),
            gateway.hostname.clone().unwrap_or_default().into(),
            gateway.wildcard_domain.clone().unwrap_or_default().into(),
            (if gateway.default { "yes" } else { "" }).into(),
            Cell::status(&gateway.status),
        ];
        if wide {
            row.extend([
                gateway.region.clone().unwrap_or_default().into(),
                format::ago(gateway.created_at, now).into(),
                gateway.status_message.clone().unwrap_or_default().into(),
            ]);
        }
        table.row(row);
    }
    table
}

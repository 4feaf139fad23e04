//! `moeworks gateway`: one address before several servers.

use std::time::Duration;

use moeworks_serve::gateway::{Endpoint, GatewayOptions, serve};
use moeworks_serve::server::StopSignal;

use crate::args::GatewayArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::listening::{Address, bind, check_metrics_prefix, client_tls, scheme, seconds, server_tls};

/// The shortest time between two looks at a server, in seconds.
const LEAST_INTERVAL: f64 = 0.01;

pub(crate) fn run(args: &GatewayArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let options = options(args)?;
    let listener = bind(&Address { host: &args.host, port: args.port })?;
    let (address, count) = (listener.local_addr()?, options.replicas.len());
    let servers = if count == 1 { "1 server" } else { &format!("{count} servers") };
    println!("gateway at {}://{address} to {servers}", scheme(options.tls.as_ref()));
    crate::output::flush();
    let stop = StopSignal::default();
    let _receiving = call.interrupts().give_to_server(&stop);
    serve(listener, options, &stop).map_err(|error| Failure::input(format!("the gateway cannot go on: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

fn options(args: &GatewayArgs) -> Result<GatewayOptions, Failure> {
    check_metrics_prefix(&args.metrics_prefix)?;
    if args.max_requests == 0 {
        return Err(Failure::input("--max-requests 0: must be at least 1"));
    }
    let (replicas, replica_tls) = (replicas(&args.to)?, client_tls(args.tls_ca.as_deref())?);
    if let (Some(server), None) = (replicas.iter().find(|replica| replica.is_tls), &replica_tls) {
        return Err(Failure::input(format!("--to {server}: give the certificate to trust by --tls-ca FILE")));
    }
    Ok(GatewayOptions {
        replicas,
        tls: server_tls(&args.tls)?,
        replica_tls,
        allowed_hosts: args.allowed_host.clone(),
        metrics_prefix: args.metrics_prefix.clone(),
        prefix_bytes: args.prefix_bytes,
        max_requests: args.max_requests,
        retries: args.retries,
        check_interval: seconds("--check-interval", args.check_interval)?.max(Duration::from_secs_f64(LEAST_INTERVAL)),
        answer_timeout: seconds("--answer-timeout", args.answer_timeout)?,
        shutdown_timeout: seconds("--shutdown-timeout", args.shutdown_timeout)?,
        ..GatewayOptions::default()
    })
}

fn replicas(to: &[String]) -> Result<Vec<Endpoint>, Failure> {
    let mut replicas: Vec<Endpoint> = Vec::new();
    for url in to {
        let endpoint = url.parse().map_err(|error| Failure::input(format!("--to {url}: {error}")))?;
        if replicas.contains(&endpoint) {
            return Err(Failure::input(format!("--to {url}: is there twice; each server counts once")));
        }
        replicas.push(endpoint);
    }
    Ok(replicas)
}

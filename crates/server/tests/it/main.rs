//! The server's tests against real databases and over HTTP.

mod db;
mod http;
mod http_users;

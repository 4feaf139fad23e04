//! The `moeworks` program.

fn main() {}

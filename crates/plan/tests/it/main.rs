//! The tests of the planner, one binary.

mod balance_claims;
mod clusters;
mod layer_splits;
mod layouts;
mod meshes;
mod models;
mod placements;
mod proposals;
mod published;
mod published_page;
mod schedules;
mod servings;
mod steps;
mod topologies;

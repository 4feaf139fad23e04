//! The tests of the planner, one binary.

mod layouts;
mod placements;
mod proposals;
mod published;
mod schedules;
mod topologies;

"""padfree under the interfaces of other projects."""

module afresh/rivals/wago

go 1.22

require github.com/wago-org/wago v0.0.0-20260724172925-c18b63dd5f93
